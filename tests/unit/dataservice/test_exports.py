import dataservice


def test_the_public_names():
    public = [name for name in vars(dataservice) if not name.startswith("_")]
    modules = {name for name in public if type(getattr(dataservice, name)).__name__ == "module"}
    assert sorted(set(public) - modules, key=str) == dataservice.__all__


def test_public_names_have_docstrings():
    for name in ("distribute", "Dataset", "DispatchServer", "WorkerServer"):
        thing = getattr(dataservice, name)
        members = (
            [thing]
            if not isinstance(thing, type)
            else [
                member
                for key, member in vars(thing).items()
                if not key.startswith("_") and callable(getattr(member, "__func__", member))
            ]
        )
        for member in members:
            text = (getattr(member, "__func__", member).__doc__ or "").strip()
            assert text, (name, member)
