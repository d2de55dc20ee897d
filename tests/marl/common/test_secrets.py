"""Secrets: which settings might be one, and what is kept of them."""

import pytest

from marl.common.secrets import digest_of, hidden, might_be_secret, redacted, secrets_in

KEY = "sk-test-31415926"


@pytest.mark.parametrize(
    "name",
    [
        "api_key", "apiKey", "APIKey", "X-Api-Key", "api-keys", "openai_api_key", "OPENAI_KEY", "key", "accessKey",
        "token", "hf_token", "access_token", "accessToken", "api_tokens", "secret", "client_secret", "clientSecret",
        "password", "db-password", "PASSWD", "passphrase", "pwd", "Authorization", "proxy-authorization", "auth",
        "bearer", "bearerToken", "credentials", "Cookie", "jwt", "chat.extra.api_key", "credentials.user",
    ],
)  # fmt: skip
def test_names_of_secrets(name: str) -> None:
    assert might_be_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        "max_tokens", "max_completion_tokens", "max_new_tokens", "token_budget", "tokenizer_games", "eos_token",
        "pad_token", "prompt_tokens", "keep", "keyboard", "monkey", "author", "authors", "credit", "passes", "compass",
        "objective", "temperature", "reasoning_effort", "top_k", "logit_bias", "tokens", "chat.max_tokens_field",
    ],
)  # fmt: skip
def test_names_of_no_secrets(name: str) -> None:
    assert not might_be_secret(name)


def test_secrets_are_digests_at_any_depth() -> None:
    settings = {
        "api_key": KEY,
        "headers": {"Authorization": f"Bearer {KEY}", "Accept": "text"},
        "tools": [{"server": {"password": 1234, "url": "http://h"}}],
        "credentials": {"user": "me", "all": ["a", "b"]},
        "max_tokens": 5,
        "token": None,
        "password": "",
        "secret": False,
        "user": f"as {KEY}",
    }
    kept = hidden(settings, [KEY])
    assert KEY not in str(kept) and "1234" not in str(kept)
    assert kept["headers"]["Accept"] == "text" and kept["tools"][0]["server"]["url"] == "http://h"
    assert (kept["max_tokens"], kept["token"], kept["password"], kept["secret"]) == (5, None, "", False)
    assert kept["api_key"] == digest_of(KEY) != digest_of("another") and len(kept["credentials"]["all"]) == 2
    assert "me" not in kept["credentials"].values() and kept["user"].startswith("secret:")
    assert hidden(kept, [KEY]) == kept and hidden(settings)["user"] == f"as {KEY}"
    assert secrets_in(settings) == [KEY, f"Bearer {KEY}", "1234", "me", "a", "b"]
    assert digest_of("a\ud800") != digest_of("a")


@pytest.mark.parametrize(
    ("argument", "shown"),
    [
        (f"+chat.extra={{api_key: {KEY}}}", "+chat.extra=..."),
        (f"++chat={{extra: {{user: {KEY}}}}}", "++chat=..."),
        (f"+reward.judge={{_target_: a.B, api_key: {KEY}}}", "+reward.judge=..."),
        (f"+reward.judge.headers={{'X-Api-Key': {KEY}}}", "+reward.judge.headers=..."),
        (f"reward.judge.apiKey={KEY}", "reward.judge.apiKey=..."),
        (f"loss.x.credentials.user={KEY}", "loss.x.credentials.user=..."),
        ("reward.mine={'password': None}", "reward.mine=..."),
        (f"chat.key={KEY}", "chat.key=..."),
        ("chat=default", "chat=default"),
        ("chat.model=a=b", "chat.model=a=b"),
        ("chat.max_tokens=5", "chat.max_tokens=5"),
        ("algo.update.token_budget=5", "algo.update.token_budget=5"),
        ("+reward.mine={_target_: a.B, weight: 1.0}", "+reward.mine={_target_: a.B, weight: 1.0}"),
        ("~chat.extra", "~chat.extra"),
    ],
)
def test_arguments_are_told_without_secrets(argument: str, shown: str) -> None:
    assert redacted([argument]) == shown
