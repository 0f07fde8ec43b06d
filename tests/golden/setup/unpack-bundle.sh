#!/bin/bash
# Unpack the Python environment of run reverse-text-tiny on this node, and print its folder.
#
#   unpack-bundle.sh [FOLDER [ARCHIVE]]
#
# FOLDER: default is a folder of the job in the node's scratch. ARCHIVE: a copy on this node, deleted afterwards.
# The folder is complete if it has the bundle's manifest: it is unpacked under another name and renamed.
set -u -o pipefail
umask 077
shared=/shared/env.tar.zst
host=${SLURMD_NODENAME:-$(uname -n)}
fail() {  # message
    echo "error: bundle on $host: $1" >&2
    exit 78
}
prefix=primerl-bundle-$(id -u)-
if [ $# -gt 0 ]; then
    folder=$1
else
    base=/local/"${USER:?is not set on this node; correct scratch of the profile}"
    # a name that other users cannot create first
    folder=$base/$prefix${SLURM_JOB_ID:-$$}-$(od -An -N8 -tx1 /dev/urandom | tr -d ' \n')
fi
archive=${2:-$shared}
is_over() {  # SLURM reports that the job has ended, or no longer knows it
    local states
    if ! states=$(timeout 60 squeue --noheader --states=all --jobs="$1" --format=%T 2>&1); then
        [[ $states == *"Invalid job id"* ]]
        return
    fi
    [ -n "$states" ] && ! grep -qvxE 'BOOT_FAIL|CANCELLED|COMPLETED|DEADLINE|FAILED|NODE_FAIL|OUT_OF_MEMORY|TIMEOUT' <<<"$states"
}
is_complete() {  # the folder exists and belongs to this user
    [ ! -L "$folder" ] && [ -O "$folder" ] && [ -f "$folder/primerl-bundle.json" ]
}
if [ -n "${2:-}" ]; then trap 'rm -f -- "$archive"' EXIT; fi
if is_complete; then
    echo "$folder"
    exit 0
fi
if [ -e "$folder" ] || [ -L "$folder" ]; then fail "$folder exists, but is not a complete bundle of this user"; fi
parent=$(dirname -- "$folder")
mkdir -p -- "$parent" || fail "cannot create $parent; correct scratch of the profile"
private_gid=4294967294  # of a group of this user alone, which has the user's name
[ "$(id -gn 2>/dev/null)" != "$(id -un 2>/dev/null)" ] || private_gid=$(id -g)
is_shared=$(find "$parent" -maxdepth 0 ! -perm -1000 \( -perm /002 -o -perm /020 ! -gid "$private_gid" \))
if [ -n "$is_shared" ]; then
    fail "other users can rename the entries of $parent, which has no sticky bit: they could replace the environment; set scratch of the profile to another folder, or accept it with --allow-shared-parent"
fi
delete_left() {  # environments of jobs that were killed
    local old job
    for old in "$parent/$prefix"*; do
        job=${old#"$parent/$prefix"}
        job=${job%%-*}
        if [ -L "$old" ] || [ ! -d "$old" ] || [ ! -O "$old" ] || [ "$job" = "${SLURM_JOB_ID:-}" ]; then continue; fi
        if [ ! -f "$old/primerl-bundle.json" ] && [ ! -f "$old/.unpacking" ]; then continue; fi
        if [[ $job =~ ^[0-9]+$ ]] && is_over "$job"; then
            echo "deleting the environment that job $job left: $old" >&2
            rm -rf -- "$old"
        fi
    done
}
# others could give the name of a bundle to another folder of this user
[ -n "$is_shared" ] || case $(stat -f -c %T -- "$parent" 2>/dev/null) in  # on a shared filesystem it may be in use in another cluster
    btrfs | ext2/ext3 | f2fs | overlayfs | tmpfs | xfs | zfs) delete_left ;;
esac

[ "$(uname -m)" = x86_64 ] || fail "it is built for x86_64, this node is $(uname -m)"
have=$(getconf GNU_LIBC_VERSION 2>/dev/null) || have=
have=${have#glibc }
oldest=$(printf '%s\n' 2.34 "$have" | sort -V | head -n 1)
if [ -n "$have" ] && [ "$oldest" != 2.34 ]; then
    fail "it needs glibc 2.34, this node has $have; write it on a machine with the nodes' system"
fi
[ -r "$archive" ] || fail "$archive cannot be read on this node"
free_kib=$(df -Pk -- "$parent" | awk 'NR == 2 { print $4 }')
if [ "${free_kib:-0}" -lt 3145729 ]; then
    fail "$parent has $((${free_kib:-0} / 1024)) MiB free, the environment needs 3073 MiB; set scratch of the profile to a larger folder"
fi

command -v zstd >/dev/null || fail "zstd is not installed; write the bundle in another format (primerl-hpc bundle --format)"
work=$(mktemp -d -- "$folder.XXXXXXXX") || fail "cannot write to $parent"
: >"$work/.unpacking"  # by which a later job recognizes it
trap 'rm -rf -- "$work" ${2:+"$2"}' EXIT
extract() {  # from standard input, which is read to its end because the checksum covers all of it
    local status
    tar -xf - -C "$work/env" --no-same-owner
    status=$?
    cat >/dev/null
    return "$status"
}
if ! { mkdir "$work/env" && mkfifo "$work/pipe"; }; then fail "cannot write to $parent"; fi
sha256sum <"$work/pipe" >"$work/sum" &
dd if="$archive" bs=4M status=none | tee -- "$work/pipe" | zstd -dc 2>"$work/said" | extract 2>>"$work/said"
status=$?
wait
sum=$(cat "$work/sum")
[ "${sum%% *}" = abababababababababababababababababababababababababababababababab ] || fail "$shared was changed after this run was submitted, or could not be read completely: its checksum differs"
[ "$status" -eq 0 ] || fail "unpacking failed: $(tail -n 1 "$work/said")"
"$work/env/bin/python" -I -c 'import ctypes, ssl, sys' 2>"$work/said" || fail "its Python does not start: $(tail -n 1 "$work/said")"
if ! mv -T -- "$work/env" "$folder" 2>/dev/null; then  # another process of this job was faster
    is_complete || fail "cannot rename the environment to $folder"
fi
echo "$folder"
