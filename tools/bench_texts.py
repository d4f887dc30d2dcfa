"A small Llama with random weights, its tokenizer and invented texts, for `bench.py`."
import json
import random

SIZE = dict(vocab_size=4096, hidden_size=256, num_hidden_layers=6, num_attention_heads=4,
            intermediate_size=704, max_position_embeddings=1024, num_labels=1)
RECORDS = 11_000


def texts(rng, low, high):
    "Texts of `low` to `high` invented words, of which few are common and most are rare."
    syllables, own = [a + b for a in 'bdfgklmnprstvz' for b in 'aeiou'], random.Random(0)
    words = [''.join(own.choices(syllables, k=own.randint(1, 4))) for _ in range(4000)]
    weights = [1/(k + 5) for k in range(4000)]
    return [' '.join(rng.choices(words, weights, k=rng.randint(low, high))) for _ in range(RECORDS)]


def tokenizer_of(texts):
    from tokenizers import decoders, models, pre_tokenizers, Tokenizer, trainers
    from transformers import PreTrainedTokenizerFast
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE['vocab_size'], special_tokens=['<pad>', '<eos>'], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token='<pad>', eos_token='<eos>')


def make_material(folder):
    "Write policy/, reward/ and records.json."
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification
    from transformers.utils import logging
    logging.disable_progress_bar()
    rng = random.Random(1)
    prompts, one, two = texts(rng, 8, 40), texts(rng, 20, 80), texts(rng, 20, 80)
    tokenizer = tokenizer_of(one)
    config = LlamaConfig(**SIZE, bos_token_id=None, eos_token_id=1, pad_token_id=0)
    torch.manual_seed(0)
    policy, reward = LlamaForCausalLM(config), LlamaForSequenceClassification(config)
    with torch.no_grad():   # logits of standard deviation 3, and EOS so rare that lengths are equal
        policy.lm_head.weight.mul_(150/SIZE['hidden_size']**.5)
        policy.lm_head.weight[tokenizer.eos_token_id] = 0
    for name, model in dict(policy=policy, reward=reward).items():
        model.save_pretrained(folder/name)
        tokenizer.save_pretrained(folder/name)
    # answers begin with a space, so that no token spans prompt and answer
    rows = [dict(instruction=p, output=f' {a}', output_1=f' {a}', output_2=f' {b}', preference=1)
            for p, a, b in zip(prompts, one, two)]
    (folder/'records.json').write_text(json.dumps(rows))
