"""This machine: parts shared by all processes of a daemon. Imports no torch.

- the home folder (`home`), and the set of models to keep warm (`warm_set`)
- messages between processes (`messages`, `channel`, `heartbeat`), their parents and children
- model files, images and downloads
- memory, installed versions, labels of the machine, systemd
"""
