"""The images of launch/container: what they copy and pin, and, where that can be done, that the CPU image is built."""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

from hybridflow.launch.site import load_site

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "launch/container"
DOCKERFILE, DEFINITION, INSTALL = (
    (FOLDER / name).read_text(encoding="utf-8") for name in ("Dockerfile", "hybridflow.def", "install.sh")
)
SETUP = (ROOT / "setup.py").read_text(encoding="utf-8")
PAGE = (ROOT / "docs/containers.md").read_text(encoding="utf-8")


def copied_by_docker():
    return {name for line in re.findall(r"^COPY (.*) \S+$", DOCKERFILE, flags=re.M) for name in line.split()}


def copied_by_apptainer():
    return set(re.findall(r"^    (\S+) /opt/", DEFINITION.partition("%files")[2].partition("%post")[0], flags=re.M))


def test_both_copy_the_same_paths_and_these_exist():
    paths = copied_by_docker()
    assert paths == copied_by_apptainer() and len(paths) == 8
    assert all((ROOT / path).exists() for path in paths)
    kept = re.findall(r"^!(.*)$", (FOLDER / "Dockerfile.dockerignore").read_text(), flags=re.M)
    assert {path.partition("/")[0] for path in paths} == set(kept)


def test_both_start_from_the_bases_of_the_docs_and_install_the_same():
    (docker,) = re.findall(r"^ARG BASE=(.*)$", DOCKERFILE, flags=re.M)
    (apptainer,) = re.findall(r"^    BASE=(.*)$", DEFINITION, flags=re.M)
    assert docker == apptainer and f"| `{docker}`, the default |" in PAGE
    cuda = re.findall(r"--build-arg BASE=(\S+?)`? ", DOCKERFILE + DEFINITION + PAGE.replace("`,", " "))
    assert len(cuda) >= 5 and set(cuda) == {"nvcr.io/nvidia/pytorch:26.06-py3"}
    extras = [re.search(r"/opt/hybridflow\[([a-z0-9,]+)\]", text)[1] for text in (DOCKERFILE, DEFINITION)]
    known = re.findall(r'^ {8}"(\w+)": \[', SETUP, flags=re.M)
    assert extras[0] == extras[1] and set(extras[0].split(",")) <= set(known)


def numbers(version):
    return tuple(map(int, version.split(".")))


def test_pins_are_those_of_the_package():
    (torch,) = re.findall(r"torch==([0-9.]+)", INSTALL)
    assert f"torch=={torch}" in (ROOT / "launch/venv.sh").read_text()
    (engine,) = re.findall(r"transformer-engine\[[^]]*\]==([0-9.]+)", INSTALL)
    first, past = re.search(r"transformer-engine\[pytorch\]>=([0-9.]+),<([0-9.]+)", SETUP).groups()
    assert numbers(first) <= numbers(engine) < numbers(past)
    (apex,) = re.findall(r"github\.com/NVIDIA/apex@([0-9a-f]{40})", INSTALL)
    assert engine in PAGE and f"`{apex[:7]}`" in PAGE
    assert subprocess.run(["sh", "-n", FOLDER / "install.sh"], check=False).returncode == 0


def test_site_settings_of_the_page_are_valid(tmp_path):
    kinds = []
    for text in re.findall(r"^```yaml\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE):
        (tmp_path / "site.yaml").write_text(text)
        kinds.append(load_site(tmp_path / "site.yaml").container.kind)
        assert yaml.safe_load(text)["container"]["mounts"] == ["/data"]
    assert kinds == ["apptainer", "pyxis"]


@pytest.mark.slow
def test_the_package_is_built_from_what_the_images_copy(tmp_path):
    for path in copied_by_docker():
        source, target = ROOT / path, tmp_path / "copied" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.so"), dirs_exist_ok=True)
        else:
            shutil.copy(source, target)
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(tmp_path / "out")]
    done = subprocess.run([*pip, str(tmp_path / "copied")], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (tmp_path / "out").glob("hybridflow-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    wanted = ("launch/recipes/quickstart.yaml", "slurm/train.sbatch", "rollout/cpu/kernels.c", "cli.py")
    assert {f"hybridflow/{name}" for name in wanted} <= set(names)


def run(*command, timeout=300):
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False)


@pytest.mark.slow
def test_docker_builds_the_cpu_image_and_it_plans_a_job():
    if shutil.which("docker") is None:
        pytest.skip("needs docker, which is not installed")
    if (asked := run("docker", "info", "--format", "{{.ServerVersion}}")).returncode:
        pytest.skip(f"needs a Docker daemon that answers: {asked.stderr.strip()}")
    base = re.search(r"^ARG BASE=(.*)$", DOCKERFILE, flags=re.M)[1]
    if (pulled := run("docker", "pull", base, timeout=600)).returncode:
        pytest.skip(f"needs the base image {base}: {pulled.stderr.strip()}")
    built = run("docker", "build", "-f", "launch/container/Dockerfile", "-t", "hybridflow:test", ".", timeout=1800)
    assert built.returncode == 0, built.stdout + built.stderr
    planned = run("docker", "run", "--rm", "hybridflow:test", "hybridflow", "plan", "job", "quickstart")
    assert planned.returncode == 0 and "most on rank" in planned.stdout, planned.stderr


@pytest.mark.slow
def test_apptainer_builds_the_cpu_image_and_it_plans_a_job(tmp_path):
    if shutil.which("apptainer") is None:
        pytest.skip("needs apptainer, which is not installed")
    base = re.search(r"^    BASE=(.*)$", DEFINITION, flags=re.M)[1]
    if (pulled := run("apptainer", "pull", str(tmp_path / "base.sif"), f"docker://{base}", timeout=600)).returncode:
        pytest.skip(f"needs the base image {base}: {pulled.stderr.strip()[-300:]}")
    image = str(tmp_path / "hybridflow.sif")
    built = run("apptainer", "build", image, "launch/container/hybridflow.def", timeout=1800)
    assert built.returncode == 0, built.stdout + built.stderr
    planned = run("apptainer", "exec", image, "hybridflow", "plan", "job", "quickstart")
    assert planned.returncode == 0 and "most on rank" in planned.stdout, planned.stderr
