"""The variables of torchrun, mpirun and srun, as the launchers set them."""

from __future__ import annotations

import pytest

from syncline.launch.world import first_host, world_of

TORCHRUN = {
    "WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x",
    "MASTER_ADDR": "a", "MASTER_PORT": "29500",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "3",
    "OMPI_MCA_ess_base_jobid": "77",
}  # fmt: skip
SLURM = {
    "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "n[03-04]",
    "SLURM_JOB_ID": "9", "SLURM_STEP_ID": "0",
}  # fmt: skip


@pytest.mark.parametrize(
    ("environment", "launcher", "rank", "size", "address", "is_here"),
    [
        (TORCHRUN, "torchrun", 3, 4, "a", False),
        ({**TORCHRUN, "MASTER_ADDR": "127.0.0.1"}, "torchrun", 3, 4, "127.0.0.1", True),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "4"}, "torchrun", 3, 4, "a", True),
        ({"WORLD_SIZE": "3", "RANK": "1", "LOCAL_RANK": "1"}, "a launcher like torchrun", 1, 3, "", False),
        (OPEN_MPI, "mpirun", 1, 3, "", True),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "MASTER_ADDR": "a"}, "mpirun", 1, 3, "a", False),
        ({"PMI_SIZE": "3", "PMI_RANK": "0", "MPI_LOCALNRANKS": "3"}, "mpirun", 0, 3, "", True),
        (SLURM, "srun", 2, 4, "n03", False),
        ({**SLURM, "SLURM_STEP_NUM_NODES": "1"}, "srun", 2, 4, "n03", True),
        # torchrun as a task of srun, or below mpirun: its own ranks count.
        ({**SLURM, **OPEN_MPI, **TORCHRUN}, "torchrun", 3, 4, "a", False),
    ],
)
def test_the_environment_says_which_rank_this_is(
    environment: dict[str, str], launcher: str, rank: int, size: int, address: str, is_here: bool
) -> None:
    world = world_of(environment)
    assert world is not None
    assert (world.launcher, world.rank, world.size) == (launcher, rank, size)
    assert (world.address, world.is_here) == (address, is_here)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "none"},
        {"WORLD_SIZE": "3"},
        {"WORLD_SIZE": "many", "RANK": "0", "LOCAL_RANK": "0"},
        {"PMI_SIZE": "1", "PMI_RANK": "0"},
        # The batch script of `sbatch -n 4`, outside of srun.
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_NPROCS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
    ],
)
def test_one_process_has_no_other_ranks(environment: dict[str, str]) -> None:
    assert world_of(environment) is None


def test_all_ranks_of_a_start_know_one_name_for_it_and_another_start_has_another() -> None:
    def run(**changed: str) -> str:
        world = world_of({**OPEN_MPI, **changed})
        assert world is not None
        return world.run

    assert run(OMPI_COMM_WORLD_RANK="0") == run(OMPI_COMM_WORLD_RANK="2", OMPI_COMM_WORLD_LOCAL_SIZE="1")
    assert run() != run(OMPI_MCA_ess_base_jobid="78")


def test_where_no_variable_tells_starts_apart_their_parent_does() -> None:
    """MPICH's launcher on one host."""
    environment = {"PMI_SIZE": "3", "PMI_RANK": "0", "MPI_LOCALNRANKS": "3"}
    one, two = world_of(environment, 17), world_of({**environment, "PMI_RANK": "1"}, 18)
    assert one is not None and two is not None and one.run != two.run


@pytest.mark.parametrize(
    ("names", "first"),
    [("n1", "n1"), ("n[1-3,7]", "n1"), ("gpu[01-04]-ib,x", "gpu01-ib"), ("a,b[1-2]", "a"), ("", "")],
)
def test_the_first_host_of_a_short_list(names: str, first: str) -> None:
    assert first_host(names) == first
