"""Pushes through the real client: one commit, and a repository of this run alone."""

import functools

import pytest
from huggingface_hub import HfApi, constants
from loopback_hub import BASE, TOKEN, USER

from hf_dp.errors import PublishError
from hf_dp.publishing.hub import Hub, publish
from hf_dp.publishing.publication import Publication

NAME = f"{USER}/model"


def expected(folder, base_model=None) -> dict[str, bytes]:
    found = Publication.of(folder, NAME, base_model)
    return {
        name: each if isinstance(each, bytes) else each.read_bytes()
        for name, each in found.files.items()
    }


@pytest.mark.parametrize(("method", "by_lfs"), [("full", False), ("lora", True), ("frost", False)])
def test_a_push_is_one_commit_of_exactly_the_publication(hub, trained, method, by_lfs):
    hub.by_lfs = by_lfs
    base_model = None if method == "full" else BASE
    done = publish(trained(method), NAME, base_model=base_model, message="Hello")
    (commit,) = hub.pushes(NAME)
    assert (commit.message, commit.oid) == ("Hello", done.oid)
    assert hub.files(NAME) == expected(trained(method), base_model)
    kinds = {line["key"] for line in commit.operations}
    assert kinds == ({"file", "lfsFile"} if by_lfs else {"file"})


def test_a_name_without_a_namespace_is_the_users(hub, full):
    publish(full, "model")
    assert list(hub.repositories) == [NAME]


@pytest.mark.parametrize("private", [None, False, True])
def test_the_repository_is_as_private_as_asked(hub, full, private):
    publish(full, NAME, private=private)
    assert hub.repositories[NAME].private is bool(private)
    if not private:
        with pytest.raises(PublishError, match=r"is public.*should be private.*settings"):
            publish(full, NAME, private=True)


def test_an_empty_repository_of_the_web_page_is_filled(hub, full):
    hub.add(NAME, {"README.md": b"---\nlicense: mit\n---\n", "LICENSE": b"MIT"})
    publish(full, NAME)
    assert hub.files(NAME) == {**expected(full), "LICENSE": b"MIT"}


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({"train.csv": b"rows"}, r"holds 'train.csv' but no privacy.json.*another name"),
        ({"model.safetensors": b"w", "README.md": b"x"}, r"holds 'model.safetensors'"),
        ({"privacy.json": b"{}"}, r"a privacy.json that cannot be read"),
    ],
)
def test_a_repository_with_other_content_is_refused_before_anything_is_sent(hub, full, files, why):
    hub.add(NAME, files)
    with pytest.raises(PublishError, match=why) as error:
        publish(full, NAME)
    assert "/tmp" not in str(error.value)
    assert hub.files(NAME) == files
    assert not any("preupload" in r.path or "commit" in r.path for r in hub.requests)


def test_another_run_is_not_pushed_over(hub, full, lora):
    publish(full, NAME)
    with pytest.raises(PublishError, match=r"holds the private run \w+, but this is run \w+"):
        publish(lora, NAME, base_model=BASE)
    assert len(hub.pushes(NAME)) == 1


def test_the_same_run_is_updated_and_never_goes_back(hub, full):
    publish(full / "checkpoint-2", NAME)
    publish(full, NAME)
    assert hub.files(NAME) == expected(full)
    with pytest.raises(PublishError, match=r"newer state of this run: it knows 4 releases"):
        publish(full / "checkpoint-2", NAME)
    publish(full, NAME)  # again the same
    assert hub.files(NAME) == expected(full)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("license: unknown", "license: mit"),
        ("## ", "Written on the page.\n\n## "),
        ("tags:\n", "thumbnail: a.png\ntags:\n"),
        ("zero-out", "add-or-remove"),
    ],
)
def test_a_card_that_was_edited_on_the_page_is_not_overwritten(hub, full, old, new):
    publish(full, NAME)
    card = hub.files(NAME)["README.md"].decode()
    assert old in card
    hub.add(NAME, {"README.md": card.replace(old, new).encode()})
    with pytest.raises(
        PublishError, match=r"README.md in '.*/model' was edited on the Hub.*describe"
    ):
        publish(full, NAME)
    assert new.encode() in hub.files(NAME)["README.md"] and len(hub.pushes(NAME)) == 2
    del hub.repositories[NAME].commits[-1].files["README.md"]  # on its page, as the error says
    publish(full, NAME)
    assert hub.files(NAME) == expected(full)


def test_planted_a_push_that_does_not_compare_the_card_overwrites_it(hub, full, monkeypatch):
    publish(full, NAME)
    hub.add(NAME, {"README.md": b"# mine"})
    monkeypatch.setattr("hf_dp.publishing.hub.is_as_made", lambda evidence, card: True)
    publish(full, NAME)
    assert hub.files(NAME)["README.md"] != b"# mine"


def test_what_is_refused_here_is_refused_before_the_hub_is_asked(hub, full):
    (full / "README.md").open("a").write("\nWritten by hand.\n")
    with pytest.raises(PublishError, match=r"README.md was edited.*delete the file"):
        publish(full, NAME)
    assert "by hand" in (full / "README.md").read_text()
    (full / "privacy.json").rename(full / "away")
    with pytest.raises(PublishError, match=r"privacy.json is missing"):
        publish(full, NAME)
    assert not hub.requests
    (full / "README.md").unlink()
    (full / "away").rename(full / "privacy.json")
    publish(full, NAME)


def test_what_an_earlier_push_left_is_deleted_by_the_same_commit(hub, full):
    (full / "generation_config.json").write_text("{}")
    publish(full, NAME)
    hub.add(NAME, {"trainer_state.json": b"{}", "runs/x": b"log", "LICENSE": b"MIT"})
    (full / "generation_config.json").unlink()
    publish(full, NAME)
    assert hub.files(NAME) == {**expected(full), "LICENSE": b"MIT"}
    done = hub.pushes(NAME)[-1].operations
    deleted = [each["value"]["path"] for each in done if each["key"] == "deletedFile"]
    assert deleted == ["generation_config.json", "runs/x", "trainer_state.json"]


@pytest.mark.parametrize("revision", ["eps-3", "release/v1"])
def test_a_branch_is_made_empty_and_holds_the_publication(hub, full, lora, revision):
    publish(full, NAME)
    publish(lora, NAME, base_model=BASE, revision=revision)  # another run beside it
    assert hub.files(NAME) == expected(full)
    assert hub.files(NAME, revision) == expected(lora, BASE)


# -- what goes wrong --


@pytest.mark.parametrize(
    ("fault", "how"),
    [
        ("create", 403),
        ("look", "drop"),
        ("commit", 500),
        ("commit", "drop"),
        ("lfs", 403),
        ("preupload", "drop"),
    ],
)
def test_a_push_that_breaks_leaves_nothing_and_the_next_succeeds(
    hub, full, fault, how, monkeypatch
):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    hub.by_lfs = True
    hub.faults[fault] = how
    if fault in ("lfs", "preupload") and how != 403:  # the client tries these again by itself
        publish(full, NAME)
        assert not hub.faults
    else:
        with pytest.raises(PublishError) as caught:
            publish(full, NAME)
        said = str(caught.value)
        assert NAME in said and ("token" if how == 403 else "ublish again") in said
        assert NAME not in hub.repositories or not hub.pushes(NAME)
    publish(full, NAME)
    assert hub.files(NAME) == expected(full)


def test_a_repository_that_changes_during_a_push_is_not_overwritten(hub, full):
    class Meanwhile(Hub):
        def check(self, repository, *args, **options):
            found = super().check(repository, *args, **options)
            hub.add(repository, {"theirs.txt": b""})
            return found

    pusher = Meanwhile()
    pusher.create(NAME)
    with pytest.raises(PublishError, match=r"changed the repository in the meantime"):
        pusher.push(NAME, Publication.of(full, NAME))
    assert hub.files(NAME) == {"theirs.txt": b""}


@pytest.mark.parametrize(
    "name", ["a/b/c", "you/has space", "you/x..y", "-x", "you/" + "x" * 97, ""]
)
def test_a_bad_name_is_said(hub, full, name):
    with pytest.raises(PublishError, match=r"name of a repository"):
        publish(full, name)
    assert not hub.repositories


def test_what_needs_no_token_is_refused_before_it_is_asked_for(full, monkeypatch):
    monkeypatch.setattr("hf_dp.publishing.hub.get_token", lambda: None)
    with pytest.raises(PublishError, match=r"`repository` to be the name of a repository.*'a/b/c'"):
        publish(full, "a/b/c")
    with pytest.raises(PublishError, match=r"`base_model` to be an id"):
        publish(full, NAME, base_model="/some/where")
    (full / "config.json").unlink()
    with pytest.raises(PublishError, match=r"config.json was saved with privacy.json but is not"):
        publish(full, NAME)


def test_no_rights_no_token_a_wrong_token_no_network(hub, full, monkeypatch):
    with pytest.raises(PublishError, match=r"(?s)'someone-else/model'.*may not write"):
        publish(full, "someone-else/model")
    with pytest.raises(PublishError, match=r"does not accept the token.*hf auth login"):
        publish(full, NAME, token="hf_" + "wrong" * 8)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(PublishError, match=r"HF_HUB_OFFLINE is set"):
        publish(full, NAME)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(full / "no-such-file"))
    with pytest.raises(PublishError, match=r"no token.*hf auth login.*HF_TOKEN"):
        publish(full, NAME)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    nobody = functools.partial(HfApi, endpoint="http://127.0.0.1:9")  # where nothing listens
    monkeypatch.setattr("hf_dp.publishing.hub.HfApi", nobody)
    with pytest.raises(PublishError, match=r"could not be reached"):
        publish(full, NAME)


def test_a_token_is_in_no_error(hub, full, monkeypatch):
    """Neither in the text, nor in anything that hangs on it."""
    hub.faults["commit"] = 500
    with pytest.raises(PublishError) as caught:
        publish(full, NAME)
    error: BaseException | None = caught.value
    while error is not None:
        assert TOKEN not in str(error) and TOKEN not in repr(vars(error))
        assert isinstance(error, PublishError)
        error = error.__cause__ or error.__context__


def test_a_planted_file_is_stopped_by_the_last_look(hub, full, monkeypatch):
    found = Publication.of(full, NAME)
    planted = {**found.files, "trainer_state.json": b"{}"}
    object.__setattr__(found, "files", planted)
    pusher = Hub()
    pusher.create(NAME)
    with pytest.raises(PublishError, match=r"'trainer_state.json' was about to be uploaded"):
        pusher.push(NAME, found)
    assert not hub.files(NAME)
