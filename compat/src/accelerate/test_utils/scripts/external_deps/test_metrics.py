"""Placeholder."""


def main() -> None:
    """Do nothing yet."""
    raise NotImplementedError("this script is not written yet")


if __name__ == "__main__":
    main()
