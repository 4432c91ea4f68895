"""Gold replays of tau2's retail tasks as conversations, one JSON array on standard output; runs in tau2's environment.

    python tau2_replays.py NUM_TASKS

Takes the training tasks with the most gold actions. The user opens with what the scenario says; before each action that
writes, the agent asks and the user agrees, as the policy demands. Tool results are what tau2's own tools answer.
"""

import json
import os
import sys
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or the import reaches for the network
_STDOUT = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what tau2 logs must not mix with the answer

from tau2.agent import llm_agent  # noqa: E402
from tau2.data_model.message import ToolCall  # noqa: E402
from tau2.environment.toolkit import ToolType  # noqa: E402
from tau2.registry import registry  # noqa: E402


def replay(task: Any) -> dict[str, Any]:
    """System prompt, tools and messages of one task; the assistant's turns hold a call or a text."""
    environment = registry.get_env_constructor("retail")()
    scenario = task.user_scenario.instructions
    opening = "\n".join(part for part in (scenario.reason_for_call, scenario.known_info) if part)
    messages: list[dict[str, Any]] = [{"role": "user", "content": opening}]
    for number, action in enumerate(task.evaluation_criteria.actions):
        if environment.tools.tool_type(action.name) == ToolType.WRITE:
            details = ", ".join(f"{key}: {value}" for key, value in action.arguments.items())
            messages += [
                {"role": "assistant", "content": f"I am about to do this: {action.name} ({details}). Do you agree?"},
                {"role": "user", "content": "Yes, please go ahead."},
            ]
        call = ToolCall(id=str(number), name=action.name, arguments=action.arguments, requestor="assistant")
        result = environment.get_response(call)
        messages += [
            {"role": "assistant", "content": "", "call": {"name": action.name, "arguments": action.arguments}},
            {"role": "tool", "content": result.content},
        ]
    messages.append({"role": "assistant", "content": "That is done. Is there anything else that I can do for you?"})
    instruction = llm_agent.AGENT_INSTRUCTION
    system = llm_agent.SYSTEM_PROMPT.format(agent_instruction=instruction, domain_policy=environment.get_policy())
    tools = [tool.openai_schema["function"] for tool in environment.get_tools()]
    return {"task": task.id, "system": system, "tools": tools, "messages": messages}


if __name__ == "__main__":
    tasks = registry.get_tasks_loader("retail")("train")
    longest = sorted(tasks, key=lambda task: -len(task.evaluation_criteria.actions or ()))[: int(sys.argv[1])]
    json.dump([replay(task) for task in longest], _STDOUT)
    _STDOUT.flush()
