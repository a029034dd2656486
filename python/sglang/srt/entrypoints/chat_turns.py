"""Builds a conversation in the form of `/v1/chat/completions` piece by piece.

Other APIs split one turn of the assistant into several items or blocks.
"""

from __future__ import annotations

from typing import Any


class ChatTurns:
    """Collects messages; consecutive output of the assistant becomes one message.

    Attributes:
        messages: the messages so far.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    @property
    def last_role(self) -> str | None:
        role: str | None = self.messages[-1]["role"] if self.messages else None
        return role

    def say(self, role: str, text: str, *, between: str | None = None) -> None:
        """Add a message whose role is neither assistant nor tool.

        Args:
            between: text that joins it to a directly preceding message of the same
                role.
        """
        if between is not None and self.last_role == role:
            self.messages[-1]["content"] += between + text
        else:
            self.messages.append({"role": role, "content": text})

    def reasoning(self, text: str) -> None:
        """Add reasoning of the assistant, which belongs to what follows it."""
        turn = self._turn()
        if turn["content"] or "tool_calls" in turn:
            turn = self._new_turn()
        turn["reasoning_content"] = turn.get("reasoning_content", "") + text

    def answer(self, text: str, *, between: str | None = None) -> None:
        """Add text of the assistant.

        Args:
            between: text that joins it to a directly preceding text, or None to start a
                new message.
        """
        turn = self._turn()
        if not turn["content"] or "tool_calls" in turn:
            between = ""
        elif between is None:
            turn, between = self._new_turn(), ""
        turn["content"] += between + text

    def call(self, call_id: str, name: str, arguments: str | dict[str, Any]) -> None:
        """Add a call of the assistant."""
        function = {"name": name, "arguments": arguments}
        call = {"id": call_id, "type": "function", "function": function}
        self._turn().setdefault("tool_calls", []).append(call)

    def result(self, call_id: str, text: str) -> None:
        """Add the result of a call."""
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": text})

    def _turn(self) -> dict[str, Any]:
        """Return the assistant's current turn, or a new one."""
        return self.messages[-1] if self.last_role == "assistant" else self._new_turn()

    def _new_turn(self) -> dict[str, Any]:
        self.messages.append({"role": "assistant", "content": ""})
        return self.messages[-1]
