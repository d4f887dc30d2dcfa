"""A completions server with the part of vLLM's protocol that a served sampler uses: token ids in
and out, log-probs, adapters loaded from folders at run time.

It holds a small model, reads adapters with `peft` (not with our own code) and decodes with
`model.generate`. With `stale` it accepts an adapter and ignores it."""
import json
import threading
from contextlib import contextmanager

import torch

from judge_server import serve


class LoraServer:
    def __init__(self, folder, stale=False, ids=True, lora=True):
        from transformers import AutoModelForCausalLM
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, trust_remote_code=False).eval()
        self.base, self.peft, self.adapters, self.log = 'base', None, [], []
        self.stale, self.ids, self.lora, self.lock = stale, ids, lora, threading.Lock()

    def answer(self, path, body):
        "Status and content; called by one thread at a time."
        self.log.append((path, body))
        if path == '/v1/models':
            adapters = [dict(id=n, parent=self.base) for n in self.adapters]
            return 200, dict(object='list', data=[dict(id=self.base, parent=None), *adapters])
        if path == '/v1/load_lora_adapter': return self.load(body['lora_name'], body['lora_path'])
        if path == '/v1/unload_lora_adapter':
            if body['lora_name'] not in self.adapters:
                return 404, dict(error='the adapter cannot be found')
            self.adapters.remove(body['lora_name'])
            if self.adapters: self.peft.delete_adapter(body['lora_name'])
            else: self.model, self.peft = self.peft.unload(), None
            return 200, 'Success'
        if path == '/v1/completions': return self.complete(body)
        return 404, dict(error='not found')

    def load(self, name, folder):
        from peft import PeftModel
        if not self.lora: return 404, dict(error='Not Found')
        if name in self.adapters:
            return 400, dict(error=f'The lora adapter {name!r} has already been loaded.')
        try:
            if self.peft: self.peft.load_adapter(folder, adapter_name=name)
            else: self.peft = PeftModel.from_pretrained(self.model, folder, adapter_name=name)
        except Exception as e: return 400, dict(error=f'{type(e).__name__}: {e}')
        self.adapters.append(name)
        return 200, f'Success: LoRA adapter {name!r} added successfully.'

    def complete(self, body):
        if body['model'] not in (self.base, *self.adapters):
            return 404, dict(error=f'The model {body["model"]!r} does not exist.')
        served = body['model'] != self.base and not self.stale
        if served: self.peft.set_adapter(body['model'])
        model = self.peft or self.model
        if self.peft and not served:
            with self.peft.disable_adapter(): choices = self.write(model, body)
        else: choices = self.write(model, body)
        return 200, dict(object='text_completion', model=body['model'], choices=choices)

    def write(self, model, body):
        torch.manual_seed(body.get('seed') or 0)
        prompt, temperature = torch.tensor([body['prompt']]), body.get('temperature', 1.)
        sampling = dict(do_sample=True, temperature=temperature, top_p=body.get('top_p', 1.),
                        top_k=0, num_return_sequences=body.get('n', 1))
        ends = body.get('stop_token_ids') or []
        with torch.no_grad():
            out = model.generate(
                input_ids=prompt, attention_mask=torch.ones_like(prompt), pad_token_id=0,
                max_new_tokens=body['max_tokens'], eos_token_id=ends or None,
                **(sampling if temperature > 0 else {}))
            answers = out[:, prompt.shape[1]:].tolist()
            choices = [dict(self.choice(model, body['prompt'], tokens, ends), index=k)
                       for k, tokens in enumerate(answers)]
        return choices[::-1]   # their order is in `index`

    def choice(self, model, prompt, tokens, ends):
        stops = [i for i, t in enumerate(tokens) if t in ends]
        if stops: tokens = tokens[:stops[0] + 1]
        logits = model(input_ids=torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1:-1]
        logp = logits.log_softmax(-1)   # before the temperature, as vLLM's
        ids = dict(token_ids=tokens, prompt_token_ids=prompt) if self.ids else {}
        return dict(text='', finish_reason='stop' if stops else 'length', **ids,
                    logprobs=dict(token_logprobs=logp[range(len(tokens)), tokens].tolist()))


@contextmanager
def lora_server(folder, **more):
    "A server on a free port, with `url`; `server.model` is the LoraServer."
    model = LoraServer(folder, **more)
    def answer(handler, body):
        with model.lock: handler.reply(*model.answer(handler.path, body and json.loads(body)))
    with serve(answer) as server:
        server.model = model
        server.url += '/v1'
        yield server
