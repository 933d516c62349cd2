"""Runs vLLM's own scheduler and cache manager in vLLM's own environment: scripts as JSON lines on stdin, traces out.

A script has the engine's settings, its requests with the tokens that they will answer, and rounds. A round adds, aborts
or resets, then runs one step; `mid` aborts while the step runs. No model is computed: the answer's tokens are given.

Steps follow each other as in vLLM's engine core: with asynchronous scheduling, one step is scheduled ahead before the
tokens of the running one are delivered. A step ahead that is empty is thrown away and scheduled again.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import torch
from vllm.config import CacheConfig, KVEventsConfig, ParallelConfig, SchedulerConfig, VllmConfig
from vllm.config.model import ModelConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 1 << 20,
    "max_position_embeddings": 1 << 16,
}


class Recorder:
    """Notes who is preempted, in order."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.preempted = []

    def _preempt_request(self, request, *args, **kwargs):
        self.preempted.append(request.request_id)
        return super()._preempt_request(request, *args, **kwargs)


class RecordingScheduler(Recorder, Scheduler):
    pass


class RecordingAsyncScheduler(Recorder, AsyncScheduler):
    pass


def config_of(settings, directory):
    Path(directory, "config.json").write_text(json.dumps(MODEL))
    config = VllmConfig(
        cache_config=CacheConfig(block_size=settings["block_size"], enable_prefix_caching=True),
        scheduler_config=SchedulerConfig(
            max_num_batched_tokens=max(settings["max_num_batched_tokens"], settings["max_model_len"]),
            max_num_seqs=settings["max_num_seqs"],
            max_model_len=settings["max_model_len"],
            long_prefill_token_threshold=settings["long_prefill_token_threshold"],
            scheduler_reserve_full_isl=settings["reserve_full_prompt"],
            watermark=settings["watermark"],
            policy=settings["policy"],
            is_encoder_decoder=False,
            enable_chunked_prefill=settings["enable_chunked_prefill"],
        ),
        parallel_config=ParallelConfig(),
    )
    config.model_config = MODELS[directory]
    config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    config.cache_config.num_gpu_blocks = settings["num_blocks"]
    config.cache_config.block_size = settings["block_size"]
    config.scheduler_config.max_num_batched_tokens = settings["max_num_batched_tokens"]  # may be less than max_num_seqs
    config.scheduler_config.max_num_scheduled_tokens = None
    config.scheduler_config.async_scheduling = settings["async_scheduling"]
    return config


MODELS = {}


class Engine:
    def __init__(self, settings, directory):
        config = config_of(settings, directory)
        spec = FullAttentionSpec(settings["block_size"], num_kv_heads=1, head_size=32, dtype=torch.float32)
        cache = KVCacheConfig(settings["num_blocks"], [], [KVCacheGroupSpec(["layer"], spec)])
        self.is_async = settings["async_scheduling"]
        self.scheduler = (RecordingAsyncScheduler if self.is_async else RecordingScheduler)(
            vllm_config=config,
            kv_cache_config=cache,
            structured_output_manager=StructuredOutputManager(config),
            block_size=settings["block_size"],
            log_stats=True,
        )
        self.hasher = get_request_block_hasher(settings["block_size"], sha256)
        self.answers = {}
        self.queue = []
        self.arrivals = 0
        self.events = []
        publish = self.scheduler.kv_event_publisher.publish
        self.scheduler.kv_event_publisher.publish = lambda batch: (self.events.extend(batch.events), publish(batch))

    def add(self, request):
        self.arrivals += 1
        self.answers[request["id"]] = request["answer"]
        self.scheduler.add_request(
            Request(
                request_id=request["id"],
                prompt_token_ids=request["prompt"],
                sampling_params=SamplingParams(
                    max_tokens=len(request["answer"]),
                    ignore_eos=True,
                    skip_reading_prefix_cache=not request["reads_cache"],
                ),
                pooling_params=None,
                arrival_time=float(self.arrivals),
                priority=request["priority"],
                block_hasher=self.hasher,
            )
        )

    def abort(self, name):
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def schedule(self):
        """One call of the scheduler, with the tokens that a model would sample for it."""
        output = self.scheduler.schedule()
        sampled = []
        for name in output.num_scheduled_tokens:
            request = self.scheduler.requests[name]
            position = request.num_computed_tokens - request.num_prompt_tokens
            sampled.append([] if request.is_prefill_chunk else [self.answers[name][position]])
        return output, sampled, self.take_preempted()

    def take_preempted(self):
        found, self.scheduler.preempted = self.scheduler.preempted, []
        return found

    def round(self, script):
        for op, value in script["ops"]:
            if op == "add":
                self.add(value)
            elif op == "abort":
                self.abort(value)
            else:
                self.scheduler.reset_prefix_cache()
        if not self.queue:
            self.queue.append(self.schedule())
        if self.is_async and self.queue[0][0].total_num_scheduled_tokens:
            ahead = self.schedule()
            if ahead[0].total_num_scheduled_tokens or ahead[2]:
                self.queue.append(ahead)
        for name in script["mid"]:
            self.abort(name)
        return self.deliver(*self.queue.pop(0))

    def deliver(self, output, sampled, preempted):
        names = list(output.num_scheduled_tokens)
        result = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
        )
        outputs = self.scheduler.update_from_output(output, result)
        events, self.events = self.events, []
        pool = self.scheduler.kv_cache_manager.block_pool
        found = {
            "scheduled": list(output.num_scheduled_tokens.items()),
            "preempted": preempted,
            "produced": [],
            "finished": [],
            "cached": {},
            "events": [written(event) for event in events],
            "free": [block.block_id for block in pool.free_block_queue.get_all_free_blocks()],
            "usage": self.scheduler.kv_cache_manager.usage,
            "running": [request.request_id for request in self.scheduler.running],
            "waiting": [request.request_id for request in self.scheduler.waiting],
            "stats": None,
        }
        for one in outputs.values():
            for each in one.outputs:
                if each.new_token_ids:
                    found["produced"].append(each.request_id)
                if each.finish_reason is not None:
                    found["finished"].append(each.request_id)
                if each.prefill_stats is not None:
                    found["cached"][each.request_id] = each.prefill_stats.num_cached_tokens
            if one.scheduler_stats is not None:
                stats = one.scheduler_stats.prefix_cache_stats
                found["stats"] = [stats.queries, stats.hits, stats.preempted_queries, stats.preempted_hits]
        return found


def written(event):
    kind = type(event).__name__
    if kind == "BlockStored":
        parent = event.parent_block_hash
        return ["S", [name(each) for each in event.block_hashes], name(parent), list(event.token_ids), event.medium]
    if kind == "BlockRemoved":
        return ["R", [name(each) for each in event.block_hashes], event.medium]
    return ["C"]


def name(block_hash):
    return block_hash.hex() if isinstance(block_hash, bytes) else block_hash


def main():
    init_none_hash(sha256)
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(MODEL))
        MODELS[directory] = ModelConfig(
            model=directory, skip_tokenizer_init=True, max_model_len=1 << 16, dtype="float32"
        )
        for line in sys.stdin:
            script = json.loads(line)
            engine = Engine(script["settings"], directory)
            print(json.dumps([engine.round(each) for each in script["rounds"]]), flush=True)


if __name__ == "__main__":
    main()
