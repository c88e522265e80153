"""Records of TRL's GRPO for `posttrain doctor FOLDER --from trl`: use ``Recorded`` in place of ``GRPOTrainer``.

Each process writes ``records-RANK.jsonl`` into the output folder, one line for each answer that is trained on.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trl import GRPOTrainer


class Recorded(GRPOTrainer):
    def _generate_and_score_completions(self, inputs: Any) -> Any:
        out = super()._generate_and_score_completions(inputs)
        self.batch, rank, count = getattr(self, "batch", -1) + 1, self.accelerator.process_index, len(out["advantages"])
        logs = {"prompt": self._logs["prompt"], "completion": self._logs["completion"], **self._logs["rewards"]}
        first = rank * count - self.accelerator.num_processes * count  # of this process, from the end of the logs
        mask = out["completion_mask"] * out.get("tool_mask", 1)
        with (Path(self.args.output_dir) / f"records-{rank}.jsonl").open("a") as file:
            for i in range(count * self.model.training):  # not of an evaluation
                row = {name: list(values)[first + i] for name, values in logs.items()}
                row = {"prompt": row.pop("prompt"), "completion": row.pop("completion"), "rewards": row}
                row |= {"step": self.state.global_step + 1, "batch": self.batch, "place": rank * count + i}
                row |= {"epoch": int(self.state.epoch or 0), "group_size": self.num_generations}
                row["weights"] = dict(zip(self.reward_func_names, self.reward_weights.tolist(), strict=True))
                row |= {"advantage": float(out["advantages"][i]), "mask": mask[i].tolist(), "tools": "tool_mask" in out}
                row |= {"ids": out["completion_ids"][i].tolist(), "ends": [self.processing_class.eos_token_id]}
                pairs = (("sampler", "sampling_per_token_logps"), ("trainer", "old_per_token_logps"))
                row |= {name: out[key][i].tolist() for name, key in pairs if key in out}
                file.write(json.dumps(row) + "\n")
        return out
