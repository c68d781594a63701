"""fedpara export: the merged model of a run or a saved state, for others to use."""

import json
from pathlib import Path
from typing import Annotated

import typer

from fedpara.apps.merged import DEFAULT_CLASSES, read_run_or_state
from fedpara.experiments.library import refuse_own


def export(
    source: Annotated[
        Path, typer.Argument(help="A run folder, or a .safetensors state saved by the library.")
    ],
    client: Annotated[
        int | None,
        typer.Option(
            help="Whose own model, of a run with private parts (pFedPara, FedPer, Local): what it keeps, in the "
            "shared part as averaged last. The next round begins with it, and `before` in metrics.jsonl scores such."
        ),
    ] = None,
    format: Annotated[str, typer.Option("--format", help="safetensors, onnx or pt2.")] = "safetensors",
    out: Annotated[Path | None, typer.Option(help="The file to write; by default beside the source.")] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="The model of a bare state: a name or package.module:function, which is imported and called. A "
            "function that only the file names never is."
        ),
    ] = None,
    classes: Annotated[
        int | None,
        typer.Option(help=f"Its classes, of a model of the library: {DEFAULT_CLASSES} unless given."),
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(help="The shape of one example, such as 3,32,32: ONNX and pt2 trace with it."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Write the merged model: plain layers, no factors.

    Example: fedpara export runs/first --format onnx
    """
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
            typer.echo("read again: every tensor is as it was written")
        else:
            typer.echo(f"checked against torch: largest difference of outputs {report.max_difference:.2e}")
