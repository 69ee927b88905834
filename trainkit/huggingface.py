"""The trained model out, in the formats of Hugging Face's transformers library."""

import json
import tempfile
from pathlib import Path

import transformers
from flax import nnx
from safetensors.numpy import save_file
from tiktoken.load import read_file_cached

from trainkit import weights
from trainkit.config import ModelConfig

PUBLISHED = ModelConfig.vocab_size  # GPT-2's


def export(model: nnx.Module, folder: str | Path) -> Path:
    """Write a folder that `transformers.AutoModelForCausalLM.from_pretrained` reads.

    It holds weights, configuration, and tokenizer, and is complete or absent. A model
    with another vocabulary than GPT-2's gets no tokenizer, and a line says so.

    Raises:
        FileExistsError: the folder is not empty.
    """
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty. Choose another folder.")
    config = model.config
    tensors = weights.tensors(config, nnx.state(model, nnx.Param))
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f"{folder.name}."))
    save_file(tensors, staging / "model.safetensors", metadata={"format": "pt"})
    their_config(config).save_pretrained(staging)
    end = config.vocab_size - 1
    transformers.GenerationConfig(bos_token_id=end, eos_token_id=end).save_pretrained(
        staging
    )
    if config.vocab_size == PUBLISHED:
        their_tokenizer().save_pretrained(staging)
    else:
        print(
            f"{folder} has no tokenizer: GPT-2's has {PUBLISHED:,} tokens, and vocab_size is "
            f"{config.vocab_size:,}. Add the one that made the tokens."
        )
    staging.chmod(0o755)
    return staging.replace(folder)


def their_config(config: ModelConfig) -> transformers.GPT2Config:
    """The same model in the words of the transformers library."""
    return transformers.GPT2Config(
        vocab_size=config.vocab_size,
        n_positions=config.block_size,
        n_embd=config.n_embd,
        n_layer=config.n_layer,
        n_head=config.n_head,
        resid_pdrop=config.dropout,
        embd_pdrop=config.dropout,
        attn_pdrop=0.0,
        bos_token_id=config.vocab_size - 1,
        eos_token_id=config.vocab_size - 1,
        architectures=["GPT2LMHeadModel"],
        dtype="float32",
    )


def their_tokenizer() -> transformers.GPT2Tokenizer:
    """GPT-2's tokenizer, made from the two files that tiktoken makes its own from."""
    url = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main"
    vocab = json.loads(read_file_cached(f"{url}/encoder.json"))
    merges = read_file_cached(f"{url}/vocab.bpe").decode().splitlines()[1:]
    return transformers.GPT2Tokenizer(
        vocab=vocab, merges=[tuple(m.split()) for m in merges]
    )
