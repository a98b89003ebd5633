"""State of a chat with one model: the conversation so far, its trimming to the context, and the next answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oallama.cli.chat.settings import ChatSettings
from oallama.cli.output import log, told_progress, write_stream, write_thought
from oallama.cli.placement_options import tell_drift
from oallama.core.errors import UsageError
from oallama.core.types import Predicted
from oallama.report.expected import ENOUGH_TOKENS, measured_texts
from oallama.run.conversation import Conversation, fewest_dropped

if TYPE_CHECKING:
    from oallama.placer import Placer
    from oallama.run.answer import Generation
    from oallama.run.engine import Engine

ANSWER_SHARE = 1 / 8  # least share of the context for the answer; the oldest turns are dropped to keep it
KEPT_SHARE = 3 / 4  # of the context: most tokens of a prompt after dropping, so that the next messages drop none


class ChatSession:
    """A conversation with a loaded model. chats: uses its chat template; else it continues the messages as one text.

    ended: the model has ended its text, so that the next message begins a new one. last: the previous answer.
    """

    def __init__(
        self,
        placer: Placer,
        engine: Engine,
        chats: bool,
        conversation: Conversation,
        settings: ChatSettings,
        takes_pictures: bool = False,
    ) -> None:
        self.placer, self.engine, self.chats, self.settings = placer, engine, chats, settings
        self.ended, self.takes_pictures = False, takes_pictures
        self.pictures: list[str] = []  # data URLs that go with the next message
        self.last: Generation | None = None
        self.conversation = conversation  # all messages, also those that the model no longer sees
        self._n_dropped = 0  # number of oldest turns that the model no longer sees
        self._n_retries = 0  # of the last question

    def begin(self, conversation: Conversation) -> None:
        """Continue another conversation. Raises UsageError for a system prompt if the model has no chat template."""
        if conversation.system is not None and not self.chats:
            raise UsageError("this model has no chat template, so it cannot be given a system prompt")
        self.conversation, self._n_dropped, self._n_retries, self.ended = conversation, 0, 0, False

    def ask(self, message: str) -> None:
        """Generate the answer to a message. Raises UsageError if it does not fit, and as rendering and generating; the
        message is then not kept."""
        if self.ended:
            self.begin(self.conversation.without_messages())
        self._n_retries = 0
        self._answer(self.conversation.with_message("user", message, self.pictures))
        self.pictures = []

    def go_on(self) -> None:
        """Continue the text. Raises UsageError if there is no text, or the model has ended it."""
        if not self.conversation.messages or self.ended:
            raise UsageError("no text to continue; type the beginning")
        self._answer(self.conversation)

    def retry(self) -> None:
        """Answer the last question again, with another seed. Raises UsageError if there is none."""
        question = self.conversation.last_question
        self._n_retries += 1
        earlier = self.conversation.without_last()
        self._answer(earlier.with_message("user", question.content, question.images))

    def undo(self) -> None:
        """Remove the last question and its answer. Raises UsageError if there is none."""
        self.conversation = self.conversation.without_last()
        self._n_dropped = max(0, min(self._n_dropped, self.conversation.n_turns - 1))
        self._n_retries, self.ended = 0, False

    def _answer(self, asked: Conversation) -> None:
        engine, self.ended = self.engine, False
        seen, n = self._fitted(asked), max(self.settings.n_gen, -1)
        shown: list[str] = []
        arguments = {"on_progress": told_progress, **self.settings.arguments(self._n_retries)}
        if self.chats:
            stream = engine.chat(seen.for_template(), True, n, on_reasoning=write_thought, **arguments)
        else:
            stream = engine.stream(seen.as_text(), n, reuse=True, **arguments)
        try:
            generation = write_stream(stream, shown)
        except KeyboardInterrupt:
            self._keep(asked, shown)
            stream.close()
            raise
        self._keep(asked, shown)
        self.last = generation
        self._tell_end(generation)

    def _keep(self, asked: Conversation, shown: list[str]) -> None:
        if shown:
            self.conversation = asked.with_message("assistant", "".join(shown))

    def _tell_end(self, generation: Generation) -> None:
        if generation.end == "context":
            log("note: the context is full, so the answer ends here; raise -c for longer ones")
        elif generation.end == "limit" and self.chats:
            log(f"note: the answer was cut at {self.settings.n_gen} tokens; /set n changes the limit")
        elif generation.end == "model" and not self.chats:
            self.ended = True
            log("note: the model ended this text; your next line begins a new one")

    def _fitted(self, asked: Conversation) -> Conversation:
        """Return the conversation without its oldest turns if it is too long. Raises UsageError if the last message
        alone is too long."""
        engine = self.engine
        n_ctx, n = engine.n_ctx, self.settings.n_gen
        room = int(ANSWER_SHARE * n_ctx) if n < 0 else min(n, int(ANSWER_SHARE * n_ctx))
        seen = asked.without_oldest(self._n_dropped)
        if self._length(seen) <= n_ctx - room:
            return seen
        for most in (int(KEPT_SHARE * n_ctx), n_ctx - room, n_ctx):
            n_more = fewest_dropped(seen, lambda shorter, most=most: self._length(shorter) <= most)  # type: ignore[misc]
            if n_more is not None:
                break
        else:
            alone = self._length(seen.without_oldest(max(0, seen.n_turns - 1)))
            what = "this message alone has" if self.chats else "this text has"
            remedy = "shorten it" if self.chats else "/clear starts a new one"
            raise UsageError(
                f"{what} {alone} tokens but the context holds {n_ctx}; {remedy}, or start with a larger -c"
            )
        if n_more:
            self._n_dropped += n_more
            system = " after the system prompt" if asked.system else ""
            log(
                f"note: the context of {n_ctx} tokens is full: the model no longer sees the oldest "
                f"{self._n_dropped} of {asked.n_turns} turns{system}"
            )
        return seen.without_oldest(n_more)

    def _length(self, conversation: Conversation) -> int:
        if self.chats:
            return self.engine.prompt_tokens(conversation.for_template())
        return len(self.engine.tokenize(conversation.as_text()))

    def _token_seconds(self, answer: Generation) -> float | None:
        """Return the predicted seconds of a token at the answer's mean depth, None without a prediction."""
        plan = self.engine.plan
        if plan.predicted is None:
            return None
        return self.placer.token_seconds(plan, answer.n_prompt + answer.n_gen // 2) or plan.predicted.tpot_s

    def tell_drift(self, answer: Generation) -> bool:
        """Warn if an answer's tokens took far longer or shorter than predicted. Returns whether it had enough tokens to
        tell."""
        if answer.n_gen < ENOUGH_TOKENS:
            return False
        tell_drift(self.placer, answer, None if self.placer.device.is_emulated else self._token_seconds(answer))
        return True

    def figures(self, answer: Generation) -> str:
        """Return the line below an answer: tokens of prompt and answer, and rates measured and predicted at this
        depth."""
        tpot_s = self._token_seconds(answer)
        expected = Predicted(0.0, tpot_s, 0.0) if tpot_s else None
        return " · ".join(
            measured_texts(answer.n_prompt, answer.ttft_s, answer.tpot_s, expected, answer.n_cached, answer.n_gen)
        )
