"""Small tokenizers of every style, built on the spot, and templates of every habit."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE, Unigram, WordLevel
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA2 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content | trim }} "
    "[/INST]{% elif m.role == 'assistant' %} {{ m.content | trim }} {{ eos_token }}{% else %}"
    "{{ raise_exception('only users and assistants here') }}{% endif %}{% endfor %}"
)
PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
# Like Qwen3's: the last answer gets an empty thought, which later renders leave out.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if loop.last and m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTROL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
TEXTS = ["hello there, how are you?", "I am fine. The answer is 42!", "yes\n\nHuman: no <|>"] * 5


def byte_level(template: str | None = CHATML, adds_bos: bool = False) -> PreTrainedTokenizerFast:
    """GPT-2 style BPE; <think> and </think> are added without being special, as in Qwen3."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_special_tokens([*CONTROL, "</s>"])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in ("<think>", "</think>", "  ")])
    if adds_bos:  # OPT: BOS and EOS are one token
        end = tokenizer.token_to_id("</s>")
        tokenizer.post_processor = processors.TemplateProcessing(
            single="</s> $A", special_tokens=[("</s>", end)]
        )
        return _wrap(tokenizer, template, bos_token="</s>", eos_token="</s>")
    return _wrap(tokenizer, template, eos_token="<|endoftext|>")


def folding(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """Whole words after NFKC and lower case, which make control strings out of other letters."""
    words = [
        "[unk]",
        "yes",
        "hello",
        "user",
        "assistant",
        "system",
        "<",
        "|",
        ">",
        "im",
        "end",
        "_",
    ]
    tokenizer = Tokenizer(WordLevel({w: i for i, w in enumerate(words)}, unk_token="[unk]"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([AddedToken(t, normalized=True, special=True) for t in CONTROL])
    return _wrap(tokenizer, template, eos_token="<|endoftext|>", unk_token="[unk]")


def sentencepiece(
    template: str | None = LLAMA2, scheme: str = "first", unknown: int = 0
) -> PreTrainedTokenizerFast:
    """Llama style Unigram that puts a space before a text (before each stretch: "always")."""
    pieces = ["<unk>", "<s>", "</s>", "▁", "▁yes", "▁hello", "yes", "er", "\n", ":", "[", "]", "/"]
    pieces += [*"abcdefghijklmnopqrstuvwxyzINSTHA<>|,_", *map(chr, range(0xE000, 0xE004))]
    scores = [(piece, float(i - len(pieces))) for i, piece in enumerate(pieces)]
    tokenizer = Tokenizer(Unigram(scores, unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return _wrap(tokenizer, template, bos_token="<s>", eos_token="</s>", unk_token=pieces[unknown])


def _wrap(tokenizer: Tokenizer, template: str | None, **tokens: str) -> PreTrainedTokenizerFast:
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **tokens)
    wrapped.chat_template = template
    return wrapped
