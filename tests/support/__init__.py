"""Helpers of the tests, by what a test needs. Tests import them as top-level modules.

A running daemon: `daemons` (a home, real processes, a tiny model), `disturbing` (suspend its
    processes, hold a job at a step), `behaviours` (rewards that wait or break), `drill`
Redis and a home without a daemon: `desks`, `ended_jobs` (thousands of jobs), `worked_sweeps`
One process, the test acting as the others: `workplaces` (a worker), `gateways`,
    `gateway_requests`, `followers` (of a job's events), `watch` (a gateway's latency and memory)
Commands: `shell` (in the process of the test), `terminal` (on a pseudo-terminal)
Other users of the machine: `other_users`; a stranger on the network of ranks: `gloo_stranger`;
    the sockets at which processes listen: `listeners`
Several machines: `clusters` and `gangs` (nodes on loopback), `machines` and `cables` (network
    namespaces and their links), `hanging_proxy`, `slurm`
Faults at random: `random_storm` (of processes, disk, power, Redis), `network_storm` (of links and
    machines); processes killed at each file-system call: `killed`
Stores and disks: `s3_servers`, `small_disks`, `flips` (damaged files), `hubs` (a model hub);
    `process_limits` (no more threads, no memory), `power` (a disk that loses what was not flushed)
A browser: `browser`, `dashboard`, `web_pages` (servers next to the gateway, a TLS proxy)
Tiny models and data: `tiny`, `tiny_vision`, `cross_encoders`, `architectures`, `engines`,
    `adapters`, `odd_tokenizers`, `gguf_models`, `tool_chats`, `tool_caller` (a
    model that is trained to call tools), `scripted_policy`, `dialogues`,
    `prefill`, `drafting` (always, by recorded tokens), `packages` (kinds from other packages)
What another program makes of a file: `llama_child`; environments for other clients and libraries:
    `environments`
Earlier and other versions: `old_homes`, `old_checkpoints`, `rq_versions`; `processor_sums`
    (whether bits are comparable)
Episodes: `episode_pools`; agents: `talkers` (plain HTTP), `openai_talkers` (OpenAI's client),
    `framework_talkers` (programs of frameworks), `lookers` (they show images); servers of
    environments: `openenv_server`, and `openenv_games` (by OpenEnv itself)
Jobs in the process of the test, and stock trainers to compare with: `grpo_jobs`,
    `group_trainers`, `sft_jobs`, `dpo_jobs`, `mlm_jobs`; in several processes: `processes`,
    `warm_imports`
A GPU that is not there: `fake_cuda`, `cuda_children`
Waiting, processes of a module, requirements, free ports, durations, parameters of wide tests:
    `waiting`, `running`, `needs`, `ports`, `durations`, `breadth`
Makers of files that are committed: `make_demo_model`, `make_old_home`

Words that only the tests use:

desk: a home with a Redis and no daemon; the test runs commands and acts as the worker
workplace: a real worker with a Redis and no daemon; the test acts as the zygote and as its horses
sturdy: the fixture of tests that kill or stop the daemon; one daemon for all of them
battered: the fixture of tests that send garbage; afterwards the daemon is healthy, and none of its
    processes was replaced
drill: a job kind whose options determine what it does (wait, fail, die), without training
storm: faults at random (processes killed, disks full, links cut) under jobs; nothing may be lost
cable: the link between a machine (a network namespace) and the hub; its states are in `cables`
"""
