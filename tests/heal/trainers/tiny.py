"""Every trainer, with a tiny Llama and a tokenizer made here: nothing is downloaded."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("WANDB_DISABLED", "true")

import logging
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from datasets import Dataset
from datasets.utils import disable_progress_bars
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Trainer,
    TrainingArguments,
    set_seed,
)

disable_progress_bars()
logging.getLogger("transformers").setLevel(logging.ERROR)
torch.set_num_threads(1)  # tiny tensors: threads cost more than they bring

OPTIONS = ("eval_dataset", "callbacks", "reward_funcs", "peft_config", "ref_model")
WORDS = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{i}" for i in range(28))]
SAMPLES = 64
LENGTH = 9


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: i for i, word in enumerate(WORDS)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    )


def config(**changes: Any) -> LlamaConfig:
    sizes = {
        "vocab_size": len(WORDS),
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "attention_dropout": 0.1,
    }
    return LlamaConfig(**{**sizes, **changes})


def llama(**changes: Any) -> LlamaForCausalLM:
    set_seed(0)
    return LlamaForCausalLM(config(**changes))


def sentence(start: int, length: int = LENGTH, stride: int = 3) -> str:
    """Words in steps of three: easy to learn."""
    return " ".join(f"w{(start + stride * i) % 28}" for i in range(length))


def tokens(samples: int = SAMPLES) -> Dataset:
    rows = [[4 + (start + 3 * i) % 28 for i in range(LENGTH)] for start in range(samples)]
    return Dataset.from_dict({"input_ids": rows, "labels": rows})


def pairs(samples: int = SAMPLES) -> Dataset:
    return Dataset.from_dict(
        {
            "prompt": [sentence(i, 3) for i in range(samples)],
            "chosen": [" " + sentence(i + 9, 4) for i in range(samples)],
            "rejected": [" " + sentence(i + 5, 4, stride=5) for i in range(samples)],
        }
    )


def arguments(kind: type, folder: Any, **changes: Any) -> Any:
    """Settings for a short and silent run on the CPU."""
    settings = {
        "output_dir": str(folder),
        "max_steps": 8,
        "per_device_train_batch_size": 4,
        "learning_rate": 3e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 0,
        "bf16": False,
        "gradient_checkpointing": False,
    }
    return kind(**{**settings, **changes})


def plain(folder: Any, model: Any = None, data: Any = None, **changes: Any) -> Trainer:
    options = {
        n: changes.pop(n)
        for n in ("eval_dataset", "callbacks", "optimizers", "data_collator")
        if n in changes
    }
    trainer = Trainer(
        model=llama() if model is None else model,
        args=arguments(TrainingArguments, folder, **changes),
        train_dataset=tokens() if data is None else data,
        **options,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def _trl(name: str) -> Any:
    for module in ("trl", f"trl.experimental.{name.removesuffix('Trainer').lower()}"):
        found = import_module(module)
        if hasattr(found, name):
            return found
    raise ImportError(name)


def _built(name: str, folder: Any, data: Dataset, model: Any, changes: dict, **own: Any) -> Any:
    module = _trl(name + "Trainer")
    extra = {n: changes.pop(n) for n in OPTIONS if n in changes}
    trainer = getattr(module, name + "Trainer")(
        model=model,
        args=arguments(getattr(module, name + "Config"), folder, **{**own, **changes}),
        train_dataset=data,
        processing_class=tokenizer(),
        **extra,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def _with_reference(changes: dict) -> dict:
    """A model to compare with; trainers would look for one on the hub. Adapters need none."""
    return changes if "peft_config" in changes else {"ref_model": llama(), **changes}


def sft(folder: Any, model: Any = None, data: Any = None, **changes: Any) -> Any:
    rows = Dataset.from_dict({"text": [sentence(i) for i in range(SAMPLES)]})
    return _built("SFT", folder, data or rows, model or llama(), changes)


def dpo(folder: Any, model: Any = None, data: Any = None, **changes: Any) -> Any:
    return _built("DPO", folder, data or pairs(), model or llama(), _with_reference(changes))


def kto(folder: Any, model: Any = None, data: Any = None, **changes: Any) -> Any:
    rows = {
        "prompt": [sentence(i, 3) for i in range(SAMPLES)],
        "completion": [" " + sentence(i + 9, 4, stride=3 + 2 * (i % 2)) for i in range(SAMPLES)],
        "label": [i % 2 == 0 for i in range(SAMPLES)],
    }
    return _built(
        "KTO", folder, data or Dataset.from_dict(rows), model or llama(), _with_reference(changes)
    )


def reward(folder: Any, model: Any = None, data: Any = None, **changes: Any) -> Any:
    if model is None:
        set_seed(0)
        model = LlamaForSequenceClassification(config(num_labels=1))
    rows = data or pairs().map(
        lambda row: {
            "chosen": row["prompt"] + row["chosen"],
            "rejected": row["prompt"] + row["rejected"],
        },
        remove_columns=["prompt"],
    )
    return _built("Reward", folder, rows, model, changes)


def even_words(completions: list[str], **ignored: Any) -> list[float]:
    """A reward that can be learned: the share of even words."""
    words = [[w for w in text.split() if w.startswith("w")] for text in completions]
    return [sum(int(w[1:]) % 2 == 0 for w in line) / max(1, len(line)) for line in words]


def _online(name: str, folder: Any, model: Any, data: Any, changes: dict) -> Any:
    rows = data or Dataset.from_dict({"prompt": [sentence(i, 3) for i in range(SAMPLES)]})
    own = {"num_generations": 4, "max_completion_length": 6, "beta": 0.0}
    changes = {"reward_funcs": even_words, **changes}
    return _built(name, folder, rows, model or llama(), changes, **own)


def grpo(folder: Any, model: Any = None, data: Any = None, **changes: Any) -> Any:
    return _online("GRPO", folder, model, data, changes)


def rloo(folder: Any, model: Any = None, data: Any = None, **changes: Any) -> Any:
    return _online("RLOO", folder, model, data, changes)


def orpo(folder: Any, model: Any = None, data: Any = None, **changes: Any) -> Any:
    return _built("ORPO", folder, data or pairs(), model or llama(), changes, max_length=32)


def cpo(folder: Any, model: Any = None, data: Any = None, **changes: Any) -> Any:
    return _built("CPO", folder, data or pairs(), model or llama(), changes, max_length=32)


TRAINERS: dict[str, Callable[..., Any]] = {
    "Trainer": plain,
    "SFT": sft,
    "DPO": dpo,
    "KTO": kto,
    "GRPO": grpo,
    "RLOO": rloo,
    "Reward": reward,
    "ORPO": orpo,
    "CPO": cpo,
}
