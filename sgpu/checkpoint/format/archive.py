"""Looks at what `torch.save` wrote before `torch.load` reads it: that it is no larger than its file. Without torch."""

from __future__ import annotations

import io
import zipfile

from sgpu.checkpoint.format import opcodes


def check(content: bytes | memoryview) -> None:
    """`torch.load(weights_only=True)` runs no code, but it unpacks what is compressed, and fills what is asked for.

    Raises:
        ValueError: reading it could take more memory than a few times its size; or it is of the time before torch 1.6.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as file:
            entries = file.infolist()
            packed = [entry.filename for entry in entries if entry.compress_type != zipfile.ZIP_STORED]
            if packed or sum(entry.file_size for entry in entries) > len(content):
                raise ValueError(f"{', '.join(packed[:3]) or 'its entries'} would be larger than the file")
            pickles = [file.read(entry) for entry in entries if entry.filename.rpartition("/")[2] == "data.pkl"]
    except (zipfile.BadZipFile, NotImplementedError, OSError) as error:
        raise ValueError(f"it is not what torch.save writes ({error})") from error
    if len(pickles) != 1:
        raise ValueError(f"expected one data.pkl, found {len(pickles)}")
    opcodes.check(pickles[0])
    if b"bytearray" in pickles[0]:  # of any size, filled
        raise ValueError("it asks for a bytearray")
