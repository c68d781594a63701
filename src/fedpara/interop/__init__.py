"""Exchange with other tools: saved states, exported models, PEFT adapters (`fedpara.interop.peft`)."""

from fedpara.interop.export import ExportReport, export
from fedpara.interop.preprocessing import Preprocessing
from fedpara.interop.rebuild import build_target, rebuild
from fedpara.interop.saved import SavedState, read_state, save_state

__all__ = [
    "ExportReport",
    "Preprocessing",
    "SavedState",
    "build_target",
    "export",
    "read_state",
    "rebuild",
    "save_state",
]
