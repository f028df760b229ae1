"""What disks do to files."""


def cut_short(file, keep=20):
    file.write_bytes(file.read_bytes()[:keep])


def flip(file, bit=400):
    """Change one bit, counted from the file's first."""
    data = bytearray(file.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)
