"""Write the language reference: `python -m msrl_graph.reference FOLDER`."""

import sys
from pathlib import Path

from . import documents

folder = Path(sys.argv[1])
folder.mkdir(parents=True, exist_ok=True)
for name, text in documents().items():
    (folder / name).write_text(text, encoding="utf-8")
