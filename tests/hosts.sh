#!/usr/bin/env bash
# Hosts for tests, made of namespaces on this machine: node1 to nodeN at 10.77.0.1 to 10.77.0.N, and a login node at 10.77.0.254. Each has its own
# network, hostname, /etc/hosts, /dev/shm and /var/tmp; the other files are shared. They hang on a bridge in the login node's own network, so that
# nothing of them can be seen outside, and any number of such worlds fit on one machine. All of it ends with the login node's first process.
#   hosts.sh world N [RATE]     is that first process: it says "ready", and then obeys lines of shell (cut 2, join 2, kill_host 2) until its input ends
#   hosts.sh at NAME COMMAND... runs a command on a host; to be called on the login node
#   ssh [OPTIONS] NAME COMMAND  the same as sshd would do it: a bare environment, the command through a shell. mpirun finds it on the login node
set -eu

at() { # NAME COMMAND...
    local pid
    pid=$(cat "/var/tmp/pids/$1")
    exec taskset --cpu-list "$(cores "${1#node}")" nsenter --target "$pid" --mount --uts --net --ipc --pid="/proc/$pid/ns/pid_for_children" \
        env -C "$PWD" TMPDIR=/var/tmp "${@:2}"
}

# What one host leaves idle must not make another faster: each has cores of its own, as far as they go.
cores() { # NUMBER: of a host
    local all part hosts i some=()
    all=($(for part in $(sed -n 's/^Cpus_allowed_list:\t//p' /proc/self/status | tr , ' '); do seq "${part%-*}" "${part#*-}"; done))
    hosts=$(ls /var/tmp/pids | wc -l)
    for ((i = $1 - 1; i < ${#all[@]}; i += hosts)); do some+=("${all[i]}"); done
    ((hosts <= ${#all[@]})) || some=("${all[@]}")
    IFS=, && echo "${some[*]}"
}

address() { [ "$1" = login ] && echo 10.77.0.254 || echo "10.77.0.${1#node}"; }

# What a host sees: its own name leads to the loopback, as Debian has it.
names() { # NAME N
    echo "127.0.0.1 localhost"
    echo "127.0.1.1 $1"
    for name in login $(seq -f node%.0f "$2"); do
        [ "$name" = "$1" ] || echo "$(address "$name") $name"
    done
}

settle() { # NAME N: gives this process's new namespaces what a host has
    hostname "$1"
    mount -t tmpfs none /dev/shm
    mount -t tmpfs none /var/tmp
    names "$1" "$2" >/var/tmp/hosts
    mount --bind /var/tmp/hosts /etc/hosts
    ip link set lo up
}

limit() { [ -z "$rate" ] || "$@" root tbf rate "$rate" burst 128kb latency 100ms; }
cut() { ip link set "to-node$1" down; }
join() { ip link set "to-node$1" up; }
kill_host() { kill -KILL "$(cat "/var/tmp/pids/node$1")"; }

world() { # N [RATE]
    local i pid rate=${2:-}
    settle login "$1"
    mkdir /var/tmp/pids /var/tmp/bin
    ln -s "$self" /var/tmp/bin/ssh
    ip link add bridge type bridge
    ip addr add "$(address login)/24" dev bridge
    ip link set bridge up
    for i in $(seq "$1"); do
        exec {up}< <(exec unshare --mount --uts --net --ipc --pid --fork --kill-child --mount-proc "$self" host "node$i" "$1")
        pid=$!
        read -r _ <&"$up"
        echo "$pid" >"/var/tmp/pids/node$i"
        exec {net}<"/proc/$pid/ns/net" # a host that is killed says its last words
        ip link add "to-node$i" type veth peer name eth0 netns "$pid"
        ip link set "to-node$i" master bridge up
        nsenter --target "$pid" --net ip addr add "$(address "node$i")/24" dev eth0
        nsenter --target "$pid" --net ip link set eth0 up
        limit tc qdisc add dev "to-node$i"
        limit nsenter --target "$pid" --net tc qdisc add dev eth0
    done
    echo ready
    while read -r line; do
        $line
        echo "done"
    done
}

host() { # NAME N: the first process of a host, which takes in the children that others leave
    settle "$@"
    echo up
    sleep infinity &
    wait $!
}

self=$(readlink -f "$0")
case ${0##*/} in
ssh)
    while [[ $1 == -* ]]; do shift; done
    name=$1
    shift
    [[ $name == node* ]] || name=node${name##*.}
    cd "$HOME"
    code=0
    (at "$name" env -i HOME="$HOME" PATH=/usr/local/bin:/usr/bin:/bin TMPDIR=/var/tmp bash -c "$*") || code=$?
    exit $((code < 128 ? code : 255)) # as ssh says that the connection was lost
    ;;
*) "$@" ;;
esac
