"""The work of `fedpara export`: write the merged model of a run or a saved state."""

import json
from pathlib import Path

import typer

from fedpara.apps.export_source import read_run_or_state
from fedpara.experiments.storage.catalog import refuse_own
from fedpara.interop import ExportReport
from fedpara.interop import export as export_model


def export(
    source: Path,
    client: int | None,
    format: str,
    out: Path | None,
    model: str | None,
    classes: int | None,
    shape: str | None,
    normalise: bool,
    overwrite: bool,
    as_json: bool,
) -> None:
    found = read_run_or_state(source, model, classes, shape, client)
    ending = {"safetensors": ".merged.safetensors"}.get(format, f".{format}")
    name = "model" if client is None else f"model-client-{client}"
    base = source / name if source.is_dir() else source.with_suffix("")
    target = out or base.with_name(base.name + ending)
    refuse_own(target)
    report = export_model(
        found.saved,
        target,
        format,  # type: ignore[arg-type]
        model=found.network,
        example=found.example,
        overwrite=overwrite,
        normalise=normalise,
    )
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "path": str(report.path),
                    "format": report.format,
                    "bytes": report.bytes,
                    "parameters": report.parameters,
                    "max_difference": report.max_difference,
                    "inputs": [{"dtype": dtype, "shape": list(shape)} for dtype, shape in report.inputs],
                    "normalises": report.normalises,
                    "preprocessing": report.preprocessing and report.preprocessing.to_entry(),
                    "note": found.note,
                }
            )
        )
    else:
        typer.echo(f"{report.path}: {report.parameters:,} parameters, {report.bytes / 1e6:.2f} MB")
        if report.max_difference is None:
            typer.echo("verified: the file holds exactly the tensors that were written")
        else:
            typer.echo(f"checked against torch: largest output difference {report.max_difference:.2e}")
        typer.echo(f"inputs: {_inputs(report, complete=source.is_dir() and found.note is None)}")
        if found.note is not None:
            typer.echo(found.note)


def _inputs(report: ExportReport, complete: bool) -> str:
    """A sentence on the file's inputs. `complete`: without preprocessing in the file, none is needed."""
    kinds = [f"{dtype} [{', '.join(map(str, ('batch', *shape)))}]" for dtype, shape in report.inputs]
    kind = " and ".join(kinds) or "of an unknown shape"
    if report.normalises:
        return f"{kind}, raw. The model normalises them: {report.preprocessing}."
    if report.preprocessing is not None:
        return f"{kind}, normalised: {report.preprocessing}."
    if complete or any(dtype == "int64" for dtype, _ in report.inputs):
        return f"{kind}, raw. The data set needs no normalisation."
    return f"{kind}, prepared as for training. The source does not say how."
