"""Each format: every sample once, exact resume in any world, transforms, metadata, and damage told with the path."""

from __future__ import annotations

import gzip
import io
import pathlib
import tarfile
import wave
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from sgpu.contract.errors import DataError, InputError
from sgpu.data import (
    AudioFiles,
    DataLoader,
    FileInfo,
    ImageFiles,
    JsonLines,
    SafetensorsFiles,
    TarSamples,
    TextLines,
    VolumeDataset,
    VolumeFiles,
)
from sgpu.data.formats.optional import optional
from tests.data.conftest import MakeVolume, being
from tests.data.formats import FORMATS, MANY, ONE, Format

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # few CPUs are no fault here
KINDS = tuple(FORMATS)
MANY_A_FILE = tuple(name for name, known in FORMATS.items() if known.numbers == MANY)


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    made = tmp_path / "files"
    made.mkdir()
    return made


@pytest.fixture
def root(folder: pathlib.Path, kind: str) -> pathlib.Path:
    FORMATS[kind].make(folder)
    return folder


def loader(known: Format, root: pathlib.Path, workers: int = 0, batch: int = 2) -> DataLoader[Any]:
    return DataLoader(known.open(root, shuffle=True, seed=3), batch, num_workers=workers, collate_fn=list)


def numbers(known: Format, batches: Any) -> list[list[int]]:
    return [[known.number(sample) for sample in batch] for batch in batches]


@pytest.mark.parametrize("kind", KINDS)
def test_an_epoch_holds_each_sample_once_and_a_new_one_another_order(kind: str, root: pathlib.Path) -> None:
    known = FORMATS[kind]
    straight = [known.number(sample) for sample in known.open(root)]
    assert sorted(straight) == list(known.numbers)
    with loader(known, root, 2) as two:
        epochs = [[n for batch in numbers(known, two) for n in batch] for _ in range(4)]
    assert [sorted(epoch) for epoch in epochs] == [list(known.numbers)] * 4
    assert len({tuple(epoch) for epoch in epochs}) >= 3  # five files have few orders


@pytest.mark.parametrize("kind", KINDS)
def test_any_stop_continues_exactly(kind: str, root: pathlib.Path) -> None:
    known = FORMATS[kind]
    with loader(known, root) as straight:
        flat = [batch for _ in range(2) for batch in numbers(known, straight)]
    running = loader(known, root)
    for seen, batch in enumerate(running, 1):
        resumed = loader(known, root)
        resumed.load_state_dict(running.state_dict())
        rest = numbers(known, resumed)
        if resumed.epoch == 1:
            rest += numbers(known, resumed)
        assert rest[: len(flat) - seen] == flat[seen:], batch


@pytest.mark.parametrize("kind", ["images", "tars", "parquet"])
def test_another_world_continues_with_what_is_left(kind: str, root: pathlib.Path) -> None:
    """Two ranks with two workers each stop after a batch; three ranks with one worker go on."""
    known = FORMATS[kind]
    seen: list[int] = []
    states = []
    for rank in range(2):
        with being(rank, 2), loader(known, root, 2, batch=1) as running:
            seen += numbers(known, [next(iter(running))])[0]
            states.append(running.state_dict())
    for rank in range(3):
        with being(rank, 3), loader(known, root, 1, batch=1) as running:
            if known.numbers == ONE:
                running.load_state_dict(states[0])
            else:
                running.load_states(states)
            seen += [n for batch in numbers(known, running) for n in batch]
    assert sorted(seen) == list(known.numbers)


@pytest.mark.parametrize("kind", ["images", "text", "arrow"])
def test_torchs_own_loader_splits_it_too(kind: str, root: pathlib.Path) -> None:
    known = FORMATS[kind]
    seen = []
    for rank in range(2):
        with being(rank, 2):
            plain = torch.utils.data.DataLoader(known.open(root, shuffle=True), 3, num_workers=2, collate_fn=list)
            seen += [n for batch in numbers(known, plain) for n in batch]
    assert sorted(seen) == list(known.numbers)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("damage", ["empty", "cut", "other"])
def test_a_damaged_file_is_named(kind: str, damage: str, root: pathlib.Path) -> None:
    known = FORMATS[kind]
    victim = max((path for path in root.rglob("*") if path.is_file() and path.suffix != ".json"), key=str)
    victim = victim.with_suffix("") if not victim.exists() else victim
    content = victim.read_bytes()
    body = {"empty": b"", "cut": content[: len(content) * 2 // 3], "other": b"\x89\xff<html>not found</html>" * 50}
    victim.write_bytes(body[damage])
    if (kind, damage) in {("text", "empty"), ("json", "empty")}:
        assert len(list(known.open(root))) < len(known.numbers)  # an empty text has no lines, and that is no fault
        return
    if (kind, damage) == ("text", "cut"):
        return  # a text that ends early is a text
    with pytest.raises(DataError) as caught:
        list(known.open(root))
    assert caught.value.path == str(victim.relative_to(root))
    assert caught.value.path in str(caught.value)
    assert f"no whole {'' if kind != 'images' else 'image'}" in str(caught.value)


@pytest.mark.parametrize("kind", ["images", "tars"])
def test_damage_reaches_the_loop_from_a_worker(kind: str, root: pathlib.Path) -> None:
    for path in root.iterdir():
        path.write_bytes(path.read_bytes()[:40])
    with loader(FORMATS[kind], root, 1) as running, pytest.raises(DataError, match="no whole"):
        list(running)


@pytest.mark.parametrize("at", [1536, 3072, 3072 + 100])
def test_a_tar_cut_between_members_is_seen(at: int, folder: pathlib.Path) -> None:
    FORMATS["tars"].make(folder)
    whole = (folder / "4.tar").read_bytes()
    for path in folder.iterdir():
        path.unlink()
    (folder / "x.tar").write_bytes(whole[:at])
    with pytest.raises(DataError, match=r"x\.tar .*(without the mark of its end|unexpected end of data)"):
        list(TarSamples(folder))


def test_lines_are_told_by_number(folder: pathlib.Path) -> None:
    (folder / "a.jsonl").write_text('{"n": 1}\n{"n": 2}\n{"n":')
    with pytest.raises(DataError, match=r"a\.jsonl .*after 2 samples.*line 3: Expecting value"):
        list(JsonLines(folder))
    (folder / "b.txt").write_bytes(b"good\nb\xffd\n")
    with pytest.raises(DataError, match=r"b\.txt .*line 2: .*utf-8"):
        list(TextLines(folder))
    assert list(TextLines(folder, encoding="latin-1")) == ["good", "bÿd"]
    with pytest.raises(InputError, match="encoding 'utf-99' is unknown"):
        TextLines(folder, encoding="utf-99")


def test_transforms_and_metadata(folder: pathlib.Path) -> None:
    FORMATS["images"].make(folder)
    files = VolumeDataset(folder, yield_metadata=True)
    found = list(ImageFiles(files, transform=lambda image: image.size))
    assert [(size, info.path) for size, info in found] == [((4 + n, 3), f"{n}.png") for n in ONE]
    for path, info in files:
        assert isinstance(info, FileInfo)
        assert info.size_bytes == pathlib.Path(path).stat().st_size
        assert info.etag
    with DataLoader(files, 2, num_workers=1) as running:
        (paths, infos), *_ = running
    assert infos.path == ("0.png", "1.png")
    assert infos.size_bytes.tolist() == [pathlib.Path(path).stat().st_size for path in paths]
    numbered = VolumeFiles(folder, yield_metadata=True)
    assert numbered[1][1].path == "1.png"
    changed = VolumeFiles(folder, yield_metadata=True)[1][1]
    (folder / "1.png").write_bytes(b"another")
    assert VolumeFiles(folder, yield_metadata=True)[1][1].etag != changed.etag


def test_images_in_other_modes(folder: pathlib.Path) -> None:
    Image.new("LA", (2, 3), (7, 9)).save(folder / "a.png")
    assert [tuple(ImageFiles(folder, mode=mode).__iter__().__next__().shape) for mode in ("L", "RGB", None)] == [
        (1, 3, 2), (3, 3, 2), (2, 3, 2),
    ]  # fmt: skip


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_sound_of_any_width_is_the_same(width: int, folder: pathlib.Path) -> None:
    wanted = np.array([-0.5, 0.0, 0.25, 0.5])
    scaled = np.round(wanted * 2 ** (8 * width - 1)).astype("<i8")
    raw = (scaled + (128 if width == 1 else 0)).astype("<i8").view(np.uint8).reshape(-1, 8)[:, :width]
    with wave.open(str(folder / "a.wav"), "wb") as file:
        file.setparams((1, width, 16000, 0, "NONE", "not compressed"))
        file.writeframes(raw.tobytes())
    ((sound, rate),) = list(AudioFiles(folder))
    assert rate == 16000
    assert sound.shape == (1, 4)
    assert np.allclose(sound.numpy()[0], wanted, atol=0.01)


def test_other_sound_files_by_soundfile(folder: pathlib.Path) -> None:
    soundfile = pytest.importorskip("soundfile")
    wave_form = np.sin(np.arange(800) / 10).astype("float32")[:, None] * np.array([[0.5, 0.25]], "float32")
    soundfile.write(folder / "a.flac", wave_form, 8000)
    soundfile.write(folder / "b.wav", wave_form, 8000, subtype="FLOAT")
    for sound, rate in AudioFiles(folder):
        assert rate == 8000
        assert np.allclose(sound.numpy().T, wave_form, atol=1e-3)


def test_tensors_by_name(folder: pathlib.Path) -> None:
    FORMATS["safetensors"].make(folder)
    assert [set(sample) for sample in SafetensorsFiles(folder, names=["y"])] == [{"y"}] * len(ONE)
    with pytest.raises(DataError, match=r"0\.safetensors .*no tensor z; it has x, y"):
        list(SafetensorsFiles(folder, names=["z"]))
    with pytest.raises(InputError, match="names must be several"):
        SafetensorsFiles(folder, names="x")


def test_a_missing_package_is_told_with_the_command() -> None:
    with pytest.raises(InputError, match=r'needs the package \'no_such_package\': pip install "sgpu\[audio\]"'):
        optional("no_such_package.part", extra="audio", purpose="reading .flac files")


def test_what_is_no_volume_is_refused(make_volume: MakeVolume) -> None:
    wrong: Any = ["a.png"]
    with pytest.raises(InputError, match="ImageFiles needs a VolumeDataset, or a folder or URL; found list"):
        ImageFiles(wrong)
    function: Any = "resize"
    with pytest.raises(InputError, match="transform must be a function"):
        ImageFiles(VolumeDataset(make_volume(2)), transform=function)


def test_a_sample_twice_in_a_tar_is_refused(folder: pathlib.Path) -> None:
    with tarfile.open(folder / "a.tar", "w") as tar:
        for name in ("x/1.txt", "y/1.txt", "y/1.txt"):
            tar.addfile(tarfile.TarInfo(name), io.BytesIO())
    with pytest.raises(DataError, match=r"sample 'y/1' has two members that end in 'txt'"):
        list(TarSamples(folder))


def test_a_compressed_text_that_was_cut_is_seen(folder: pathlib.Path) -> None:
    (folder / "a.txt.gz").write_bytes(gzip.compress(b"line\n" * 1000)[:-10])
    with pytest.raises(DataError, match=r"a\.txt\.gz .*EOFError"):
        list(TextLines(folder))
