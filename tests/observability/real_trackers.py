"""A small run with real packages, in a process of its own: `python real_trackers.py FOLDER NAME_ATTRIBUTE...`.

The network is off: whoever looks a host up or connects to one beyond this machine gets an OSError. Each package writes in its local or
offline mode, is read back from what it wrote, by its own reader where it has one, and the line FOUND of the output says what was found.
"""

from __future__ import annotations

import json
import os
import sqlite3
import sys
import traceback
import zipfile
from pathlib import Path
from typing import Any

STAY_OFFLINE = {
    "COMET_ERROR_TRACKING_ENABLE": "0",
    "COMET_LOGGING_CONSOLE": "ERROR",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ALLOW_FILE_STORE": "true",
    "CLEARML_OFFLINE_MODE": "1",
    "CLEARML_LOG_LEVEL": "ERROR",
    "DVC_NO_ANALYTICS": "1",
    "DVCLIVE_LOGLEVEL": "ERROR",
    "SWANLAB_MODE": "offline",
    "DO_NOT_TRACK": "1",
    "GIT_CEILING_DIRECTORIES": "/",
}


def main() -> None:
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    sys.addaudithook(no_network)
    os.chdir(folder)
    os.environ.update(STAY_OFFLINE, **places(folder))
    (folder / "clearml.conf").write_text("sdk.development.report_use_subprocess: false\n")
    found = {}
    for name in names:
        try:
            warnings = run(name, folder)
            found[name] = {**READERS[name](folder), "said": warnings}
        except Exception:
            found[name] = {"failed": traceback.format_exc()}
    print("\nFOUND " + json.dumps(found), flush=True)


def places(folder: Path) -> dict[str, str]:
    return {
        "HOME": str(folder),
        "MLFLOW_TRACKING_URI": f"file:{folder}/mlruns",
        "CLEARML_CACHE_DIR": str(folder / "clearml"),
        "CLEARML_CONFIG_FILE": str(folder / "clearml.conf"),
        "TRACKIO_DIR": str(folder / "trackio"),
    }


def no_network(event: str, given: tuple[Any, ...]) -> None:
    host = given[0] if event == "socket.getaddrinfo" else given[1][0] if event == "socket.connect" and isinstance(given[1], tuple) else None
    if host is not None and str(host) not in ("", "localhost", "127.0.0.1", "::1", "0.0.0.0"):
        raise OSError(f"no network in tests, and none for {host}")


OPTIONS: dict[str, dict[str, Any]] = {
    "comet_ml": {"online": False},
    "clearml": {
        "auto_resource_monitoring": False,
        "auto_connect_frameworks": False,
        "auto_connect_streams": False,
        "auto_connect_arg_parser": False,
    },
    "trackio": {"auto_log_cpu": False, "auto_log_gpu": False},
    "dvclive": {"save_dvc_exp": False},
}


def run(name: str, folder: Path) -> list[str]:
    """What a training run asks of a tracker, at steps that are not in a row; gives what was warned of."""
    import logging

    import numpy
    import torch

    from slipstream.observability.trackers.registry import Trackers, resolve_trackers

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("slipstream").addHandler(handler)
    trackers = Trackers(resolve_trackers(name, folder), folder, is_main_process=True)
    nested = {"sizes": torch.tensor([1, 2])}
    settings = {"lr": 0.1, "rule": lambda step: step, "kind": torch.float32, "place": Path("a/b"), "nested": nested}
    trackers.start("demo", settings, {name: OPTIONS.get(name, {})})
    assert trackers.get(name, unwrap=True) is not None
    trackers.log({"loss": torch.tensor(1.5), "eval/accuracy": numpy.float32(0.5)}, step=3)
    trackers.log({"loss": 1.25, "weights": torch.zeros(3)}, step=torch.tensor(7))
    rows = numpy.arange(20, dtype=numpy.uint8).reshape(4, 5, 1)
    trackers.log_images({"sample": [numpy.repeat(rows, 3, axis=2)], "grey": torch.rand(1, 4, 5)}, step=7)
    trackers.log_table("answers", columns=["question", "score"], data=[["x", 1], ["y", 2]], step=7)
    trackers.finish()
    logging.getLogger("slipstream").removeHandler(handler)
    return said


# -- what was written -----------------------------------------------------------------------------------------------------


def read_comet(folder: Path) -> dict[str, Any]:
    (archive,) = (folder / ".cometml-runs").glob("*.zip")
    with zipfile.ZipFile(archive) as file:
        messages = [json.loads(line) for line in file.read("messages.json").splitlines()]
    metrics = [message["payload"]["metric"] for message in messages if message["type"] == "metric_msg"]
    parameters = [
        message["payload"].get("param") or message["payload"]["params"] for message in messages if message["type"] == "parameter_msg"
    ]
    settings = {parameter["paramName"]: parameter["paramValue"] for parameter in parameters}
    files = [message["payload"]["additional_params"] for message in messages if message["type"] == "file_upload"]
    return {
        "loss": [[metric["step"], metric["metricValue"]] for metric in metrics if metric["metricName"] == "loss"],
        "accuracy": [[metric["step"], metric["metricValue"]] for metric in metrics if metric["metricName"] == "eval/accuracy"],
        "settings": [settings["lr"], settings["nested|sizes"]],
        "pictures": sum(file.get("figName") in ("sample.png", "grey.png") and file["step"] == 7 for file in files),
        "tables": sum(file.get("fileName") == "answers-7.csv" for file in files),
    }


def read_mlflow(folder: Path) -> dict[str, Any]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient()
    experiment = client.get_experiment_by_name("demo")
    (run,) = client.search_runs([experiment.experiment_id])
    identity = run.info.run_id
    return {
        "loss": [[value.step, value.value] for value in client.get_metric_history(identity, "loss")],
        "accuracy": [[value.step, value.value] for value in client.get_metric_history(identity, "eval/accuracy")],
        "settings": [run.data.params["lr"], run.data.params["nested/sizes"]],
        "pictures": len(client.list_artifacts(identity, "images")),
        "tables": sum(file.path == "answers.json" for file in client.list_artifacts(identity)),
    }


def read_clearml(folder: Path) -> dict[str, Any]:
    (archive,) = (folder / "clearml" / "offline").glob("*.zip")
    with zipfile.ZipFile(archive) as file:
        events = [event for line in file.read("metrics.jsonl").splitlines() for event in json.loads(line)]
        settings = json.loads(file.read("task.json"))["configuration"]["General"]["value"]
        pictures = [name for name in file.namelist() if name.endswith((".png", ".jpeg"))]
    lines = {key: [[e["iter"], e["value"]] for e in events if (e.get("metric"), e.get("variant")) == key] for key in LINES}
    return {
        "loss": lines["loss", "train"],
        "accuracy": lines["accuracy", "eval"],
        "settings": [settings.split("lr = ")[1].split("\n")[0], settings.split("sizes = ")[1].split("\n")[0]],
        "pictures": len(pictures),
        "tables": sum(event.get("metric") == "answers" and event["iter"] == 7 for event in events),
    }


LINES = (("loss", "train"), ("accuracy", "eval"))


def read_trackio(folder: Path) -> dict[str, Any]:
    base = sqlite3.connect(folder / "trackio" / "demo.db")
    rows = [(step, json.loads(values)) for step, values in base.execute("select step, metrics from metrics order by id")]
    (config,) = (json.loads(entry) for (entry,) in base.execute("select config from configs"))
    base.close()
    return {
        "loss": [[step, values["loss"]] for step, values in rows if "loss" in values],
        "accuracy": [[step, values["eval/accuracy"]] for step, values in rows if "eval/accuracy" in values],
        "settings": [config["lr"], config["nested"]["sizes"]],
        "pictures": len(list((folder / "trackio" / "media").rglob("*.png"))),
        "tables": sum(values.get("answers", {}).get("_type") == "trackio.table" and step == 7 for step, values in rows),
    }


def read_swanlab(folder: Path) -> dict[str, Any]:
    import yaml
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    (place,) = (folder / "swanlog").glob("run-*")
    reader = DataStoreReader()
    reader.open(next(place.glob("*.swanlab")))
    records = [Record.FromString(entry) for entry in reader]
    reader.close()
    scalars = [record.scalar for record in records if record.WhichOneof("record_type") == "scalar"]
    config = yaml.safe_load((place / "files" / "config.yaml").read_text())
    return {
        "loss": [[scalar.step, scalar.value.number] for scalar in scalars if scalar.key == "loss"],
        "accuracy": [[scalar.step, scalar.value.number] for scalar in scalars if scalar.key == "eval/accuracy"],
        "settings": [config["lr"]["value"], config["nested"]["value"]["sizes"]],
        "pictures": len(list((place / "media" / "image").glob("007-*"))),
        "tables": None,
    }


def read_dvclive(folder: Path) -> dict[str, Any]:
    import yaml

    def values(name: str) -> list[Any]:
        lines = (folder / "dvclive" / "plots" / "metrics" / f"{name}.tsv").read_text().splitlines()[1:]
        return [[int(line.split("\t")[0]), float(line.split("\t")[1])] for line in lines]

    config = yaml.safe_load((folder / "dvclive" / "params.yaml").read_text())
    return {
        "loss": values("loss"),
        "accuracy": values("eval/accuracy"),
        "settings": [config["lr"], config["nested"]["sizes"]],
        "pictures": len(list((folder / "dvclive" / "plots" / "images").rglob("7.png"))),
        "tables": None,
    }


def read_aim(folder: Path) -> dict[str, Any]:
    from aim import Repo, Run
    from aim.storage.context import Context

    repo = Repo(str(folder))
    (identity,) = repo.list_all_runs()
    run = Run(identity, repo=repo, system_tracking_interval=None, capture_terminal_logs=False)
    frames = {metric.name: metric.dataframe() for metric in run.metrics() if not metric.name.startswith("__")}
    points = {name: [list(row) for row in frame[["step", "value"]].itertuples(index=False)] for name, frame in frames.items()}
    settings = run["hparams"]
    pictures = [run.get_image_sequence(name, Context({"picture": 0})) for name in ("sample", "grey")]
    run.close()
    return {
        "loss": points["loss"],
        "accuracy": points["eval/accuracy"],
        "settings": [settings["lr"], list(settings["nested"]["sizes"])],
        "pictures": sum(picture is not None for picture in pictures),
        "tables": None,
    }


READERS = {
    "comet_ml": read_comet,
    "mlflow": read_mlflow,
    "clearml": read_clearml,
    "trackio": read_trackio,
    "swanlab": read_swanlab,
    "dvclive": read_dvclive,
    "aim": read_aim,
}


if __name__ == "__main__":
    main()
