"""The work of `fedpara export`: write the merged model of a run or a saved state."""

import json
from pathlib import Path

import typer

from fedpara.apps.export_source import read_run_or_state
from fedpara.experiments.storage.catalog import refuse_own


def export(
    source: Path,
    client: int | None,
    format: str,
    out: Path | None,
    model: str | None,
    classes: int | None,
    shape: str | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    from fedpara.interop.export import export as export_model

    saved, network = read_run_or_state(source, model, classes, shape, client)
    ending = {"safetensors": ".merged.safetensors"}.get(format, f".{format}")
    name = "model" if client is None else f"model-client-{client}"
    base = source / name if source.is_dir() else source.with_suffix("")
    target = out or base.with_name(base.name + ending)
    refuse_own(target)
    report = export_model(saved, target, format, model=network, overwrite=overwrite)  # type: ignore[arg-type]
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "path": str(report.path),
                    "format": report.format,
                    "bytes": report.bytes,
                    "parameters": report.parameters,
                    "max_difference": report.max_difference,
                }
            )
        )
    else:
        typer.echo(f"{report.path}: {report.parameters:,} parameters, {report.bytes / 1e6:.2f} MB")
        if report.max_difference is None:
            typer.echo("verified: the file holds exactly the tensors that were written")
        else:
            typer.echo(f"checked against torch: largest output difference {report.max_difference:.2e}")
