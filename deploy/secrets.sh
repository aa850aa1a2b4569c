#!/bin/sh
# Makes the secrets that compose.yaml names, with random passwords, in the directory ../secrets or the one given.
#
# Compose mounts each file as it is, with its owner and mode, into containers whose programs are other users than
# you: so anybody may read the files, and the directory is what keeps others of this machine from them.
set -eu

directory=${1:-$(dirname "$0")/../secrets}
umask 077
if ! mkdir "$directory"; then
    echo "error: $directory cannot be made, or is there already; nothing was changed" >&2
    exit 1
fi

password() {
    od -An -v -tx1 -N24 /dev/urandom | tr -d ' \n'
}

# Of PostgreSQL's superuser.
password >"$directory/postgres"

# Of FlowForge's logins, each as a service of libpq, which programs refer to by service=flowforge. A passfile would
# have to belong to the very user that reads it.
for login in owner scheduler publisher worker client operator; do
    printf '[flowforge]\npassword=%s\n' "$(password)" >"$directory/ff_$login"
done

# Of RabbitMQ's user: the broker reads its own settings file, and takes no password from another.
rabbitmq=$(password)
printf '%s\n' "$rabbitmq" >"$directory/rabbitmq"
printf '%s\n' \
    'default_user = flowforge' "default_pass = $rabbitmq" 'default_user_tags.administrator = false' \
    >"$directory/rabbitmq.conf"

chmod 444 "$directory"/*
