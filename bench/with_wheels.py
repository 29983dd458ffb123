"""Install a folder of wheels into a temporary folder, and run a Python file with these packages first.

    python bench/with_wheels.py DIR bench/gpu.py --minutes 8

For a bare machine without a network: `make gpu-wheels` fills the folder. The package is the one of this checkout.
Nothing of the machine is changed, and only the standard library is needed.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path


def main() -> int:
    wheels, *command = sys.argv[1:]
    found = sorted(map(str, Path(wheels).glob("*.whl")))
    if not found:
        print(f"no wheel is in {wheels}: make gpu-wheels", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as site:
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
        subprocess.run(
            [*install, "--no-cache-dir", "--disable-pip-version-check", "--target", site, *found], check=True
        )
        others = os.environ.get("PYTHONPATH")
        paths = os.pathsep.join([site, str(Path(__file__).parent.parent), *([others] if others else [])])
        return subprocess.run([sys.executable, *command], env=os.environ | {"PYTHONPATH": paths}).returncode


if __name__ == "__main__":
    sys.exit(main())
