"""Writes handwritten digits as TFRecord files, one for training and one held out: python make_data.py FOLDER

The images are those of scikit-learn, 8 x 8, made 28 x 28. A record is a tf.train.Example with the features
`image_raw` (784 bytes) and `label`, as MNIST is often stored. TensorFlow isn't needed.
"""

import struct
import sys
from pathlib import Path

import google_crc32c
import numpy as np
from sklearn.datasets import load_digits


def field(number, kind, data):
    """Return one field of a message of protocol buffers."""
    head = bytes([number << 3 | kind])
    return head + (data if kind == 0 else varint(len(data)) + data)


def varint(value):
    """Return a whole number, seven bits to a byte."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def example(image, label):
    """Return a tf.train.Example with an image and its label."""
    features = {
        "image_raw": field(1, 2, field(1, 2, image.tobytes())),
        "label": field(3, 2, field(1, 2, varint(int(label)))),
    }
    entries = (
        field(1, 2, field(1, 2, name.encode()) + field(2, 2, value)) for name, value in features.items()
    )
    return field(1, 2, b"".join(entries))


def record(data):
    """Return a record: length, checksum of it, data, checksum of these."""

    def checksum(part):
        crc = google_crc32c.value(part)
        return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)

    length = struct.pack("<Q", len(data))
    return length + checksum(length) + data + checksum(data)


folder = Path(sys.argv[1])
folder.mkdir(parents=True, exist_ok=True)
images, labels = load_digits(return_X_y=True)
large = np.kron(images.reshape(-1, 8, 8), np.ones((3, 3)))  # 24 x 24
large = np.pad(large / 16 * 255, ((0, 0), (2, 2), (2, 2))).astype("uint8")
order = np.random.default_rng(0).permutation(len(labels))
for name, rows in (("train", order[:1500]), ("test", order[1500:])):
    path = folder / f"{name}.tfrecord"
    path.write_bytes(b"".join(record(example(large[row], labels[row])) for row in rows))
    print(f"{path}: {len(rows)} rows")
