"""A taskset of verifiers: the items of an evaluation (``items.jsonl``) as its tasks."""

import json

import verifiers.v1 as vf


class StoryData(vf.TaskData):
    answer: str


class StoryTask(vf.Task[StoryData]):
    @vf.reward
    async def named(self, trace: vf.Trace) -> float:
        """Whether the reply names the right number."""
        return float(self.data.answer in (trace.last_reply or ""))


class StoriesConfig(vf.TasksetConfig):
    items: str = "items.jsonl"


class Stories(vf.Taskset[StoryTask, StoriesConfig]):
    def load(self):
        with open(self.config.items) as lines:
            for row in map(json.loads, lines):
                yield StoryTask(StoryData(prompt=row["question"], answer=row["answer"]), self.config.task)


__all__ = ["Stories"]
