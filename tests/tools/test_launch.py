"""The files of launch/: scripts that shellcheck accepts, a manifest whose parts fit one another, and what Slurm would run."""

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from cce_dist.tools.pretrain import add_arguments, exits

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted([*ROOT.glob("launch/*.sh"), ROOT / "launch" / "slurm.sbatch"])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_sound(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    found = subprocess.run(["shellcheck", "-x", script.relative_to(ROOT)], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


@pytest.fixture(scope="module")
def manifest() -> SimpleNamespace:
    """The documents of the manifest, and the specification of its job, of the pods, and of their container."""
    yaml = pytest.importorskip("yaml")
    claim, policy, jobset = yaml.safe_load_all((ROOT / "launch" / "kubernetes.yaml").read_text())
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = job["template"]["spec"]
    [container] = pod["containers"]
    return SimpleNamespace(claim=claim, policy=policy, jobset=jobset, job=job, pod=pod, container=container)


def test_the_manifest_names_one_meeting_place_and_a_command_that_fits(manifest: SimpleNamespace) -> None:
    """Catches a name or a number changed in one place alone, and arguments that the command does not have."""
    jobset, spec, pod, container = manifest.jobset, manifest.job, manifest.pod, manifest.container
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    name, [job] = jobset["metadata"]["name"], jobset["spec"]["replicatedJobs"]
    environment = {variable["name"]: variable["value"] for variable in container["env"]}
    assert (job["replicas"], spec["completionMode"], pod["restartPolicy"]) == (1, "Indexed", "Never")
    assert manifest.policy["spec"]["podSelector"]["matchLabels"] == {"jobset.sigs.k8s.io/jobset-name": name}
    assert environment["RUN_ID"]
    assert spec["parallelism"] == spec["completions"] == int(environment["NNODES"])
    # A pod is called <jobset>-<job>-<replica>-<index>, under a service that has the jobset's name.
    host, port = environment["RDZV"].split(":")
    assert host == f"{name}-{job['name']}-0-0.{name}" and int(port) == container["ports"][0]["containerPort"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    claims = [v["persistentVolumeClaim"]["claimName"] for v in pod["volumes"] if "persistentVolumeClaim" in v]
    assert claims == [manifest.claim["metadata"]["name"]]
    assert os.access(ROOT / container["command"][0], os.X_OK)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args(container["args"])
    assert args.tp * args.dp == container["resources"]["limits"]["nvidia.com/gpu"] * int(environment["NNODES"])


def test_image_and_folder_are_those_that_the_dockerfile_makes(manifest: SimpleNamespace, tmp_path: Path) -> None:
    """Catches a name of the image or a path inside it that one of three files has alone, and a folder that it lacks."""
    dockerfile = (ROOT / "launch" / "Dockerfile").read_text()
    [image] = re.findall(r"docker build .* -t (\S+)", dockerfile)
    [folder] = re.findall(r"^WORKDIR (.*)", dockerfile, re.M)
    assert manifest.container["image"] == image
    user = manifest.pod["securityContext"]
    assert f"USER {user['runAsUser']}:{user['runAsGroup']}\n" in dockerfile
    [of_slurm] = re.findall(r"IMAGE=(\S+) sbatch", (ROOT / "launch" / "slurm.sbatch").read_text())
    assert of_slurm == image.replace("/", "#")  # as pyxis has it
    said = queue(tmp_path, IMAGE=of_slurm).stdout
    assert said.startswith(f"--container-image={of_slurm}\n") and f"\n{folder}/launch/pretrain.sh\n--tp\n8\n" in said
    copied = [name for line in re.findall(r"^COPY (.*) ", dockerfile, re.M) for name in line.split()]
    assert all((ROOT / name).exists() for name in copied)
    assert {"launch", "cce_dist", "kernels", "integrations", "pyproject.toml", "README.md"} <= {*copied}


def test_kubernetes_gives_time_and_no_rights(manifest: SimpleNamespace) -> None:
    """Catches a grace period that ends a checkpoint, a hopeless run that is restarted, and root."""
    pod = manifest.pod
    assert pod["terminationGracePeriodSeconds"] >= 300
    assert pod["securityContext"]["runAsNonRoot"] and pod["automountServiceAccountToken"] is False
    assert manifest.container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    codes = manifest.job["podFailurePolicy"]["rules"][0]
    assert codes["action"] == "FailJob" and codes["onExitCodes"]["values"] == [exits.HOPELESS, 2]
    assert manifest.jobset["spec"]["failurePolicy"]["rules"][0]["action"] == "FailJobSet"


def queue(folder: Path, **job: str) -> subprocess.CompletedProcess[str]:
    """Run slurm.sbatch among stand-ins that print what they are asked; ``python3`` leaves with $CODE."""

    def executable(name: str, text: str) -> None:
        (folder / name).write_text("#!/usr/bin/env bash\n" + text)
        (folder / name).chmod(0o755)

    asked = '[ "$1 $2" = "show hostnames" ] && printf "gpu7\\ngpu8\\ngpu9\\n" || echo "scontrol $*"\n'
    executable("scontrol", asked)
    shown = '[ -z "${IMAGE:-}" ] || { printf "%s\\n" "$@"; exit 0; }' + "\n"
    options = "while [[ $1 == --* ]]; do [[ $1 == *=* ]] && shift || shift 2; done\n"
    executable("srun", shown + options + 'exec "$@"\n')
    executable("python3", 'printf "%s\\n" "$@"\nexit ${CODE:-0}\n')
    job = {"SLURM_JOB_NODELIST": "gpu[7-9]", "SLURM_JOB_NUM_NODES": "3", "SLURM_JOB_ID": "1234567"} | job
    job |= {"SLURM_SUBMIT_DIR": str(ROOT), "PATH": f"{folder}:{os.environ['PATH']}"}
    script = ROOT / "launch" / "slurm.sbatch"
    return subprocess.run(["bash", script, "--tp", "8"], env=job, capture_output=True, text=True)


def test_slurm_starts_one_agent_a_node_where_all_meet(tmp_path: Path) -> None:
    words = queue(tmp_path).stdout.split("\n")
    for option, value in (("--nodes", "3"), ("--meet", "gpu7:29967"), ("--run-id", "1234567")):
        assert words[words.index(option) + 1] == value
    assert words[:3] == ["-m", "cce_dist", "pretrain"] and words[-3:] == ["--tp", "8", ""]


def test_slurm_queues_a_stopped_job_again_and_no_failed_one(tmp_path: Path) -> None:
    script = (ROOT / "launch" / "slurm.sbatch").read_text()
    assert "#SBATCH --signal=USR1@300" in script
    stopped, failed = queue(tmp_path, CODE="75"), queue(tmp_path, CODE="1")
    assert stopped.returncode == 75 and stopped.stdout.endswith("scontrol requeue 1234567\n")
    assert failed.returncode == 1 and "requeue" not in failed.stdout
    assert "requeue" not in queue(tmp_path, CODE="75", SLURM_RESTART_COUNT="1000").stdout


@pytest.mark.slow
def test_a_group_is_measured_as_far_as_cpus_can(tmp_path: Path) -> None:
    """Catches a step that no longer starts, a result that is not kept, a failed step that is called none."""
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.txt").write_text((ROOT / "README.md").read_text())
    environment = {"PATH": os.environ["PATH"], "PYTHON": sys.executable, "DEVICE": "cpu", "PRESET": "toy", "STEPS": "2"}
    environment |= {"ONLY": "label-smoothing-one", "CORPUS": str(tmp_path / "corpus"), "OUT": str(tmp_path / "out")}
    command = [ROOT / "launch" / "measure_group.sh", "1"]
    parts = ("verify", "bench", "stages", "pretrain")
    done = subprocess.run([*command, *parts], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    rows = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")][1:]
    outcome = {row[0][2:]: row[1] for row in rows}
    others = ("bench", "stage-megatron", "stage-deepspeed")
    ran = dict.fromkeys(("verify", "pretrain"), "ok")
    assert outcome == ran | dict.fromkeys(others, "not run: it needs GPUs")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["log.txt", "pretrain.jsonl", "table.md"]
    assert '"step": 2' in (tmp_path / "out" / "pretrain.jsonl").read_text()
    failing = environment | {"PYTHON": "false"}
    failed = subprocess.run([*command, "verify"], env=failing, capture_output=True, text=True)
    assert failed.returncode == 1 and "| verify | failed, exit code 1 |" in failed.stdout
    assert "kill" not in failed.stdout
    unknown = subprocess.run([*command, "verfy"], env=failing, capture_output=True, text=True)
    assert unknown.returncode == 2 and "verfy is none of: verify bench" in unknown.stderr


def test_several_nodes_need_a_place_to_meet() -> None:
    environment = {"NNODES": "2", "PATH": os.environ["PATH"]}
    failed = subprocess.run([ROOT / "launch" / "pretrain.sh"], env=environment, capture_output=True, text=True)
    assert failed.returncode == 1
    assert failed.stderr == "launch/pretrain.sh: RDZV=host:port is needed for 2 nodes\n"
