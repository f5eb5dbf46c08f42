#!/usr/bin/env bash
# Tune all methods on validation examples, ten trials each, into tuned/: heart disease for each seed, because a seed
# draws its test patients; the others have fixed test examples.
set -euo pipefail
cd "$(dirname "$0")"
methods=local,fedavg,fedavg-ft,fedprox,fedper,fedrep,fedbabu,lg-fedavg,per-fedavg,pfedme,pfedhn,ditto,apfl,fedala
methods+=,fedfomo,fedamp,layer-similarity,model-similarity,pfedla,heurpfedla,pfedla-heldout
tune() { # NAME DATASET OPTIONS…
    out=../../runs/tuning/$1
    pfedla tune -a "$methods" -d "$2" --trials 10 --engine threaded --out "$out" --resume "${@:3}"
    cp "$out/tuned.toml" "tuned/$1.toml"
}
mkdir -p tuned
tune tcga-brca tcga-brca --rounds 20 --local-epochs 5 --batch-size 64 --seeds 100
tune sentiment sentiment --rounds 15 --local-epochs 1 --seeds 100
tune watch watch --rounds 20 --local-epochs 2 --seeds 100
for seed in 0 1 2 3 4 5 6 7 8 9; do
    tune "heart-disease-s$seed" heart-disease --rounds 15 --local-epochs 5 --seeds "$seed"
done
