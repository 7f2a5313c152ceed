"""The smallest script that `accelerate launch` is tested with: it says where it runs."""

import os

from accelerate import PartialState


def main() -> None:
    """Print this process's place, and check it against the variables of the launcher."""
    state = PartialState()
    wanted = int(os.environ.get("WORLD_SIZE", "1"))
    assert state.num_processes == wanted, f"{state.num_processes} processes, but WORLD_SIZE={wanted}"
    print(f"process {state.process_index} of {state.num_processes} on {state.device}")


if __name__ == "__main__":
    main()
