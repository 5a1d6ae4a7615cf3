"""The apex shim: opt-in, found by every kind of look-up, second to a real package, and removed without a trace."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import halfpeak
from halfpeak import shim
from halfpeak.cli.main import main
from shim.process import changes, process_state
from support.forks import python

PROBE = """
import importlib.metadata, importlib.util, sys
import halfpeak
from halfpeak import amp
def answers():
    try:
        import apex
        found = True
    except ImportError:
        found = False
    try:
        version = importlib.metadata.version("apex")
    except importlib.metadata.PackageNotFoundError:
        version = None
    return found, importlib.util.find_spec("apex") is not None, importlib.util.find_spec("amp_C") is not None, version
print(answers())
import halfpeak.shim
print(answers())
halfpeak.shim.install()
print(answers()[:2], answers()[3])
halfpeak.shim.uninstall()
print(answers())
"""


def test_nothing_answers_until_it_is_installed_nor_afterwards(tmp_path: Path) -> None:
    done = python("-c", PROBE, folder=tmp_path, strict=True)
    nothing = "(False, False, False, None)"
    assert done.stdout.splitlines() == [nothing, nothing, "(True, True) 0.1+halfpeak", nothing], done.stderr


@pytest.fixture
def clean() -> Iterator[None]:
    yield
    shim.uninstall()


def test_install_twice_and_uninstall_twice(clean: None) -> None:
    before = process_state()
    shim.install()
    once = process_state()
    shim.install()
    assert not changes(once)
    assert shim.installed() == ("apex",)
    shim.uninstall("apex")
    shim.uninstall("apex")
    assert shim.installed() == ()
    assert not changes(before)


def test_what_was_imported_is_gone_after_uninstall(clean: None) -> None:
    before = process_state()
    shim.install()
    from apex import amp
    from apex.parallel import LARC

    model = torch.nn.Linear(2, 2)
    optimizer = LARC(torch.optim.SGD(model.parameters(), lr=0.1))
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    amp.register_float_function(torch, "sigmoid")
    assert changes(before)
    assert hasattr(optimizer, "_amp_stash")
    shim.uninstall()
    assert not changes(before)
    assert not [name for name in vars(optimizer) if "amp" in name]
    # Objects that came through the shim keep working.
    with halfpeak.amp.scale_loss(model(torch.ones(1, 2)).sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()


def test_registrations_of_the_session_are_forgotten(clean: None) -> None:
    shim.install()
    from apex import amp

    amp.lists.functional_overrides.FP32_FUNCS.remove("softmax")
    amp.lists.functional_overrides.FP16_FUNCS.append("softmax")
    softmax = torch.nn.functional.softmax
    model = amp.initialize(torch.nn.Linear(2, 2), opt_level="O1", verbosity=0)
    assert softmax(torch.ones(2), -1).dtype is torch.float16
    shim.uninstall()
    assert softmax(torch.ones(2), -1).dtype is torch.float32
    model = halfpeak.amp.initialize(torch.nn.Linear(2, 2), opt_level="O1", verbosity=0)
    assert softmax(model(torch.ones(2)), -1).dtype is torch.float32


def test_the_distribution(apex_installed: None) -> None:
    assert importlib.metadata.distribution("Apex").metadata["Name"] == "apex"
    assert importlib.metadata.packages_distributions()["apex"] == ["apex"]
    names = [one.metadata["Name"] for one in importlib.metadata.distributions()]
    assert names.count("apex") == 1
    # The metadata of CUDA wheels omits the CUDA version.
    assert importlib.metadata.version("torch").partition("+")[0] == torch.__version__.partition("+")[0]


def test_a_real_distribution_of_that_name_goes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, apex_installed: None
) -> None:
    info = tmp_path / "apex-9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: apex\nVersion: 9.9\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert importlib.metadata.version("apex") == "9.9"


PKG_RESOURCES = """
import sys
class Distribution:
    def __init__(self, location, project_name, version):
        self.location, self.key, self.version = location, project_name, version
class WorkingSet:
    def __init__(self):
        self.entries, self.entry_keys, self.by_key = [], {}, {}
    def require(self, name):
        sys.path.insert(0, self.by_key[name].location)
    def add(self, dist):
        self.entries.append(dist.location)
        self.entry_keys.setdefault(dist.location, []).append(dist.key)
        self.by_key[dist.key] = dist
working_set = WorkingSet()
"""


@pytest.mark.parametrize("imported_first", [True, False])
def test_pkg_resources_knows_it(
    imported_first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clean: None
) -> None:
    """Tested with a stand-in for pkg_resources, which newer setuptools does not have."""
    (tmp_path / "pkg_resources.py").write_text(PKG_RESOURCES)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "pkg_resources", raising=False)
    if imported_first:
        importlib.import_module("pkg_resources")
    for name in ("apex", "mmcv"):  # both wait for one import
        shim.install(name)
    working_set = importlib.import_module("pkg_resources").working_set
    found = {name: one.version for name, one in working_set.by_key.items()}
    assert found == {"apex": "0.1+halfpeak", "mmcv": "1.7.2+halfpeak"}
    path = list(sys.path)
    working_set.require("apex")  # as pytorch-lightning 1.9 does
    assert sys.path != path
    assert importlib.import_module("apex").amp.__name__ == "apex.amp"
    shim.uninstall()
    assert sys.path == path
    assert (working_set.by_key, working_set.entry_keys, working_set.entries) == ({}, {}, [])
    del sys.modules["pkg_resources"]


@pytest.mark.parametrize("name", ["apex", "mmcv"])
def test_nothing_can_be_imported_from_the_place_of_a_distribution(name: str, clean: None) -> None:
    shim.install(name)
    place = str(importlib.metadata.distribution(name).locate_file(""))
    for module in ("apex", "mmcv", "mmengine", "spec", "halfpeak"):
        assert importlib.machinery.PathFinder.find_spec(module, [place]) is None
    shim.uninstall()


def test_an_unknown_shim(clean: None) -> None:
    before = process_state()
    for function in (shim.install, shim.uninstall):
        with pytest.raises(halfpeak.ConfigError, match=r"no shim 'detectron'.*'apex'"):
            function("detectron")
    assert not changes(before)


@pytest.fixture
def real_apex(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An installed apex with optimizers and without amp and parallel, as newer releases are."""
    package = tmp_path / "apex"
    (package / "optimizers").mkdir(parents=True)
    (package / "__init__.py").write_text("from . import optimizers\nREAL = True\n")
    (package / "optimizers" / "__init__.py").write_text("class FusedAdam:\n    real = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield package
    shim.uninstall()
    for name in [name for name in sys.modules if name.split(".")[0] == "apex"]:
        del sys.modules[name]


@pytest.mark.parametrize("imported_first", [True, False])
def test_a_real_apex_keeps_what_it_has_and_gets_what_it_lacks(imported_first: bool, real_apex: Path) -> None:
    if imported_first:
        importlib.import_module("apex")
    shim.install()
    import apex

    assert apex.REAL
    assert apex.__file__ == str(real_apex / "__init__.py")
    assert apex.__spec__.loader is apex.__loader__
    assert type(apex.__loader__).__name__ == "SourceFileLoader"
    assert apex.optimizers.FusedAdam.real
    assert apex.amp.initialize.__module__.startswith("halfpeak")  # without an import of apex.amp
    from apex.parallel import DistributedDataParallel

    assert issubclass(DistributedDataParallel, torch.nn.parallel.DistributedDataParallel)
    with pytest.raises(ImportError, match="Megatron-Core"):
        importlib.import_module("apex.transformer")
    with pytest.raises(ImportError, match="cannot import name 'nothere' from 'apex'"):
        exec("from apex import nothere", {})
    with pytest.raises(AttributeError, match="module 'apex' has no attribute 'nothere'"):
        apex.nothere  # noqa: B018

    shim.uninstall()
    assert not [name for name in vars(apex) if name in ("amp", "parallel", "__getattr__")]
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("apex.amp")
    assert apex.optimizers.FusedAdam.real


def test_a_real_package_keeps_its_own_way_of_answering(real_apex: Path) -> None:
    (real_apex / "__init__.py").write_text("def __getattr__(name):\n    return name * 2\n")
    shim.install()
    import apex

    assert apex.lazy == "lazylazy"
    assert apex.amp.scale_loss is halfpeak.amp.scale_loss
    shim.uninstall()
    assert apex.amp == "ampamp"


def test_run_says_whose_apex_it_is(
    real_apex: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text("import apex\nprint(apex.REAL, apex.amp.__name__)\n")
    assert main(["run", str(script)]) == 0
    seen = capsys.readouterr()
    assert seen.out == "True apex.amp\n"
    assert "completes the installed apex" in seen.err


def test_a_folder_that_is_no_package_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, apex_installed: None
) -> None:
    """For example a clone of apex beside the script."""
    (tmp_path / "apex" / "csrc").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    import apex

    assert "halfpeak" in str(apex.__file__)
