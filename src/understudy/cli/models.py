"""understudy models: what is bundled, and what is supported."""

from __future__ import annotations

from rich.table import Table

from understudy import bundled
from understudy.cli.console import out, verb

EXAMPLES = """
**Examples**

`understudy models`
"""


@verb
def models() -> None:
    """List the bundled models and the supported families."""
    from understudy.anatomy import FAMILIES
    from understudy.recipes import RECIPES

    table = Table(title="bundled models", title_justify="left")
    table.add_column("name", style="bold")
    table.add_column("what it is")
    table.add_column("size", justify="right")
    for name in bundled.NAMES:
        size = sum(file.stat().st_size for file in bundled.folder(name).iterdir() if file.is_file())
        table.add_row(name, RECIPES[name].summary, f"{size / 1e6:.1f} MB")
    out.print(table)
    families = Table(title="supported families", title_justify="left")
    families.add_column("model_type", style="bold")
    families.add_column("family")
    for key, family in FAMILIES.items():
        families.add_row(key, family.title)
    out.print(families)
    out.print("Any of them loads by hub id, from a local folder, or as timm/NAME.", highlight=False)
