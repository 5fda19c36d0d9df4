"""The peers: other tools that can run the interventions of CFS, each as its own documentation would have it written."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from benchmarks.peers.contract import CannotRun, Way

__all__ = ["PEERS", "CannotRun", "Peer", "Way"]


@dataclass(frozen=True)
class Peer:
    """A tool, the module here that speaks to it, and why it offers no way to resume, if so."""

    tool: str  # as the package index calls it
    module: str
    no_resume: str = ""

    def way(self, name: str) -> type[Way] | None:
        """The class of the way "full" or "resume"; None where the peer has none. Imports the tool."""
        module = importlib.import_module(f"benchmarks.peers.{self.module}")
        return getattr(module, name.capitalize(), None)


PEERS = (
    Peer("nnsight", "nnsight_peer"),
    Peer("transformer-lens", "transformer_lens_peer"),
    Peer("pyvene", "pyvene_peer", no_resume="pyvene always runs the whole model"),
    Peer(
        "captum",
        "captum_peer",
        no_resume="captum has no resume of its own: it runs the forward function that it is given",
    ),
)
