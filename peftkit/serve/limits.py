"""Limits of a server: each bounds the time or the memory of one request before the work starts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a server, and defaults of requests.

    Args:
        max_batch: Most completions that run simultaneously, and most of one request.
        max_waiting: Most prompts that wait; further requests receive HTTP 429.
        max_body: Most bytes of a request; larger ones receive HTTP 413.
        max_new_tokens: Default maximum length of a completion.
        temperature: Default temperature; 0 is greedy.
        schema_bytes: Most characters of a JSON schema or grammar.
        grammar_seconds: Most CPU seconds to compile a grammar.
        grammar_bytes: Most memory to compile a grammar.
        lexer_states: Most states of a grammar's lexer, about 2 kB each.
        tensor_bytes: Most bytes of the tensors of a Tinker request, sparse ones made dense.
        upload_bytes: Most bytes of an uploaded file.
        line_bytes: Most bytes of one line, or of one JSON array, in an uploaded file.
        row_work: Most characters times messages of an uploaded conversation; its rendering takes
            time in proportion.
        job_deaths: Times that a job may end the server's process before it fails.
    """

    max_batch: int = 32
    max_waiting: int = 64
    max_body: int = 1 << 20
    max_new_tokens: int = 1024
    temperature: float = 0.0
    schema_bytes: int = 1 << 16
    grammar_seconds: int = 2
    grammar_bytes: int = 1 << 30
    lexer_states: int = 50_000
    tensor_bytes: int = 1 << 28
    upload_bytes: int = 512 << 20
    line_bytes: int = 32 << 20
    row_work: int = 1 << 27
    job_deaths: int = 3


DEFAULTS = Limits()
