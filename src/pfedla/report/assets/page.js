// The sections of the page, made of its data.

const main = document.getElementById("main");
const several = (data) => data.runs.length > 1;

const byMetric = (runs) => [...new Set(runs.map((run) => run.metric.label))].map((label) => runs.filter((run) => run.metric.label === label));
const distinctBy = (runs, key) => runs.filter((run, n) => runs.findIndex((other) => other[key] === run[key]) === n);

function summarySection(data) {
  const spread = ["mean", "std", "p10", "worst"];
  const explain = (metric) => el("p", { class: "note" }, `Test ${metric.label} of the personal models, what each client would deploy, on its own test data, last round: mean, standard deviation, ${metric.percentile} and worst over the clients that have a value. After training: of the model right after local training, before it is mixed again. Baseline: the best constant answer by the client's training labels. MiB (2^20 bytes): tensors sent, down is server to client.`);
  if (several(data)) {
    return [...data.tables.filter((one) => one.lines.length).flatMap(seedsTable), ...byMetric(data.runs).flatMap((runs) => {
      const [{ metric }] = runs, shown = (found, keys) => keys.map((key) => score(found?.[key], metric));
      const rows = runs.map((run) => {
        const end = run.final;
        return [run.name, ...shown(end, [...spread, "after"]), end ? mebibytes(end.down) : "–", end ? mebibytes(end.up) : "–",
          end?.seconds == null ? "–" : end.seconds.toFixed(1), `${run.played} of ${run.rounds}`];
      });
      const kinds = distinctBy(runs.filter((run) => run.baseline), "fingerprint");
      const constant = kinds.map((run) => [`${run.baseline.name} (baseline)${kinds.length > 1 ? `, ${run.where}, seed ${run.seed}` : ""}`, ...shown(run.baseline, spread), ...Array(5).fill("–")]);
      return [table(["run", metric.label, "std", metric.percentile, "worst", "after training", "MiB down", "MiB up", "s", "rounds"], [...rows, ...constant]), explain(metric)];
    })];
  }
  const [run] = data.runs, { final: end, metric } = run;
  if (!end) return [el("p", {}, "No round has been evaluated yet.")];
  const tiles = [[metric.label, score(end.mean, metric), "mean of clients"], ["worst client", score(end.worst, metric), metric.short], [metric.percentile, score(end.p10, metric), metric.short],
    ["spread", score(end.std, metric), "standard deviation over clients"], ["after training", score(end.after, metric), `mean ${metric.short}`],
    ...(run.baseline ? [["baseline", score(run.baseline.mean, metric), run.baseline.name]] : []),
    ["MiB down", mebibytes(end.down), "server to clients"], ["MiB up", mebibytes(end.up), "clients to server"], ["rounds", `${run.played}`, `of ${run.rounds}`],
    ...(end.seconds == null ? [] : [["seconds", end.seconds.toFixed(1), "all rounds"]])];
  return [el("div", { class: "tiles" }, ...tiles.map(([name, value, unit]) => el("div", { class: "tile" }, el("span", {}, name), el("b", {}, value), el("span", {}, unit)))), explain(metric)];
}

/** Methods over seeds; a cell between two ** is bold. */
function seedsTable({ caption, lines: [heads, ...rows], notes }) {
  const bold = (cell) => (cell.startsWith("**") ? el("td", {}, el("b", {}, cell.slice(2, -2))) : cell);
  return [el("h3", {}, "Methods over seeds"), table(heads, rows.map((cells) => cells.map(bold)), caption), el("p", { class: "note" }, notes.join(" "))];
}

function curvesSection(data) {
  const line = (run, key) => run.curve.map((point) => [point.round, point[key]]);
  const options = (metric) => ({ label: `${metric.label} over the rounds`, xLabel: "round", whole: true, yText: scoreText(metric), xText: (round) => `round ${round}` });
  if (several(data)) return [...byMetric(data.runs).flatMap((runs) => [el("p", {}, `Personal models, mean of clients: ${runs[0].metric.axis}.`),
    chart(runs.map((run) => ({ name: run.name, colour: colour(data.runs.indexOf(run)), points: line(run, "mean") })), options(runs[0].metric))]),
  ...data.tables.map(({ caption }) => el("p", { class: "note" }, caption))];
  const [run] = data.runs;
  return [el("p", {}, `Over the rounds: ${run.metric.axis}.`), chart([{ name: "mean of clients", colour: colour(0), points: line(run, "mean") }, { name: run.metric.percentile, colour: colour(3), dash: "2 3", points: line(run, "p10") },
    { name: "worst client", colour: colour(6), dash: "6 3", points: line(run, "worst") }, { name: "after training, mean of the cohort", colour: colour(1), points: line(run, "after") }], options(run.metric))];
}

function clientsSection(data) {
  const runs = data.runs.filter((run) => run.clients.length);
  if (!runs.length) return [el("p", {}, "Every client's score is known when the run is finished.")];
  const parts = [];
  const groups = byMetric(runs).flatMap((some) => distinctBy(some, "fingerprint").map((one) => some.filter((run) => run.fingerprint === one.fingerprint))); // clients of other federations are others
  for (const group of groups) {
    const [first] = group, { metric } = first, goodness = (client) => (first.clients[client].score === null ? -Infinity : metric.sign * first.clients[client].score);
    const order = first.clients.map((_, client) => client).sort((a, b) => (goodness(a) < goodness(b) ? -1 : +(goodness(a) > goodness(b))));
    const undefinedOf = order.filter((client) => first.clients[client].score === null).length;
    const names = order.map((client) => `${first.clients[client].name}${first.clients[client].attacks ? " (attacks)" : ""}`);
    const series = group.map((run) => ({ name: run.name, colour: colour(data.runs.indexOf(run)), points: order.map((client, rank) => [rank, run.clients[client].score]) }));
    parts.push(el("p", {}, `One column a client, sorted by ${first.name}. Worst: ${order.slice(undefinedOf, undefinedOf + 3).map((client) => `client ${first.clients[client].name} (${score(first.clients[client].score, metric)})`).join(", ")}.${undefinedOf ? ` Undefined for ${undefinedOf} of ${order.length} clients.` : ""}`),
      chart(series, { label: `${metric.label} of every client`, xLabel: "client", dots: true, names: names.length <= 25 ? names : null, yText: scoreText(metric), xText: (rank) => `client ${names[rank]}` }));
    const local = group.find((run) => run.algorithm === "local");
    for (const run of local ? group.filter((one) => one !== local && one.seed === local.seed) : []) parts.push(...gains(run, local, data.runs.indexOf(run)));
  }
  if (!runs.some((run) => run.algorithm === "local")) parts.push(el("p", { class: "note" }, "With a run of Local on the same federation beside it, this section shows who gains by taking part: pfedla report RUN LOCAL-RUN."));
  for (const run of runs.filter((one) => one.unseen)) parts.push(el("p", {}, `${run.name}: ${run.unseen.clients} unseen clients joined after the run. Mean ${run.metric.short} as they joined ${score(run.unseen.before, run.metric)}, joined ${score(run.unseen.joined, run.metric)}, had they trained alone ${score(run.unseen.alone, run.metric)}.`));
  parts.push(el("p", {}, download("clients.csv", () => {
    const others = [...new Set(runs.flatMap((run) => run.metrics.map((one) => one.name)))], value = (run, name, n) => run.metrics.find((one) => one.name === name)?.per_client[n];
    return [["run", "client", "metric", "score", "score_after_training", "training_examples", "attacks", ...others],
      ...runs.flatMap((run) => run.clients.map((client, n) => [run.name, client.name, run.metric.name, client.score, client.after, client.examples, client.attacks, ...others.map((name) => value(run, name, n))]))];
  })));
  return parts;
}

function gains(run, local, position) {
  const { sign, percent: inPoints } = run.metric, unit = inPoints ? " points" : "";
  const gained = run.clients.map((client, n) => [client.name, client.attacks || client.score === null || local.clients[n].score === null ? null : sign * (client.score - local.clients[n].score)])
    .filter((pair) => pair[1] !== null).sort((a, b) => a[1] - b[1]);
  if (!gained.length) return [];
  const points = (gain) => `${gain > 0 ? "+" : ""}${inPoints ? (100 * gain).toFixed(1) : plain(gain)}`;
  const winners = gained.filter((pair) => pair[1] > 0).length, losers = gained.filter((pair) => pair[1] < 0);
  const who = losers.length ? ` Worst off: ${losers.slice(0, 3).map(([name, gain]) => `client ${name} (${points(gain)}${unit})`).join(", ")}.` : " Nobody loses.";
  return [el("h3", {}, `Gain over Local: ${run.name}`),
    sign < 0 ? el("p", { class: "note" }, `${run.metric.label}: a gain is how much lower it is than with Local.`) : null,
    el("p", {}, el("span", { class: "gain" }, `${winners} of ${gained.length} clients gain`), ...(losers.length ? [", ", el("span", { class: "loss" }, `${losers.length} lose`)] : []), `.${who}`),
    chart([{ name: "gain", colour: colour(position), points: gained.map((pair, rank) => [rank, pair[1]]) }], { label: `Gain of every client over Local, ${run.name}`, xLabel: "client", dots: true, zero: true,
      names: gained.length <= 25 ? gained.map((pair) => pair[0]) : null, yText: (value) => points(value), xText: (rank) => `client ${gained[rank][0]},${unit || " gain"} over Local` })].filter(Boolean);
}

function metricsSection(data) {
  const runs = data.runs.filter((run) => run.metrics.length > 1);
  return runs.flatMap((run) => {
    const defined = (one) => `${one.per_client.filter((value) => value !== null).length} of ${one.per_client.length}`;
    const rows = run.metrics.map((one) => [one.label, ...["mean", "std", "worst"].map((key) => score(one[key], one)), defined(one)]);
    const each = run.names.slice(0, 200).map((name, n) => [name, ...run.metrics.map((one) => (one.per_client[n] === null ? "undefined" : score(one.per_client[n], one)))]);
    const cut = run.names.length > 200 ? `The first 200 of ${run.names.length}; clients.csv has all.` : "";
    return [several(data) ? el("h3", {}, run.name) : null, table(["metric", "mean", "std", "worst", "clients that have it"], rows),
      el("details", {}, el("summary", {}, `${run.name}: every client`), table(["client", ...run.metrics.map((one) => one.label)], each, cut))].filter(Boolean);
  });
}

function federationSection(data) {
  const distinct = data.runs.filter((run, n) => run.federation && data.runs.findIndex((other) => other.fingerprint === run.fingerprint) === n);
  if (!distinct.length) return null;
  return distinct.flatMap((run) => {
    const { clients, classes, train, order } = run.federation, most = largest(train.flat(), 1);
    const map = heatMap(clients.length, classes.length, (row, column) => (train[order[row]][column] / most) ** 2, {
      label: "Training examples of each class: clients down, classes across", leave: hideTip, height: Math.min(420, Math.max(120, 18 * clients.length)),
      point: (row, column, x, y) => showTip(`client ${clients[order[row]]}: ${train[order[row]][column]} training examples of class ${classes[column]}`, x, y),
    });
    return [distinct.length > 1 ? el("h3", {}, run.name) : null, el("p", {}, `${clients.length} clients (rows, the alike beside each other) and ${classes.length} classes (columns): training examples.`), labelled(map, order.map((client) => clients[client]), classes, ["client", "class"]), scale("0", `${most} examples`)].filter(Boolean);
  });
}

function trafficSection(data) {
  const rows = data.runs.filter((run) => run.final).map((run) => [run.name, mebibytes(run.final.down), mebibytes(run.final.up), mebibytes(run.final.down + run.final.up)]);
  const drawing = byMetric(data.runs.filter((run) => run.curve.some((point) => point.down + point.up > 0))).map((runs) => {
    const series = runs.map((run) => ({ name: run.name, colour: colour(data.runs.indexOf(run)), points: run.curve.map((point) => [point.down + point.up, point.mean]) })), [{ metric }] = runs;
    return chart(series, { label: `${metric.label} by what has been sent`, xLabel: "MiB sent, down and up", yText: scoreText(metric), xText: (sent) => `${mebibytes(sent)} MiB` });
  });
  const retained = data.runs.filter((run) => run.final?.down && run.curve.some((point) => Object.keys(point.retained).length)).map((run) => {
    const total = {};
    for (const point of run.curve) for (const [layer, count] of Object.entries(point.retained)) total[layer] = (total[layer] || 0) + count;
    return el("p", {}, `${run.name} retained layers, in the rounds shown: ${Object.entries(total).sort((a, b) => b[1] - a[1]).map(([layer, count]) => `${layer} ${count} times`).join(", ")}.`);
  });
  return [table(["run", "MiB down", "MiB up", "MiB in all"], rows), ...drawing, ...retained];
}

function timeSection(data) {
  return data.runs.flatMap((run) => {
    const phases = Object.entries(run.phases), total = phases.reduce((sum, [, seconds]) => sum + seconds, 0);
    if (!total) return [];
    const bar = el("div", { class: "phases", "aria-hidden": "true" }, ...phases.map(([, seconds], n) => el("i", { style: `--key:${colour(n)};width:${(100 * seconds) / total}%` })));
    const series = phases.map(([phase, seconds], n) => ({ name: `${phase} ${seconds.toFixed(1)} s (${percent(seconds / total)})`, colour: colour(n) }));
    return [several(data) ? el("h3", {}, run.name) : null, legend(series), bar].filter(Boolean);
  });
}

function faultsSection(data) {
  const rows = data.runs.flatMap((run) => Object.entries(run.failures).flatMap(([client, reasons]) =>
    Object.entries(reasons).map(([reason, times]) => [run.name, `client ${run.names[client] ?? client}`, reason, times])));
  if (!rows.length) return [el("p", {}, "Every client that was drawn answered, and every upload was used.")];
  rows.sort((a, b) => b[3] - a[3]);
  const refused = data.runs.filter((run) => run.refused !== null).map((run) => `${run.name}: ${run.refused} uploads refused`).join("; ");
  return [el("p", {}, refused), table(["run", "client", "why it had no part", "rounds"], rows.slice(0, 50), rows.length > 50 ? `The 50 most frequent of ${rows.length}; result.json has all.` : "")];
}

function settingSection(data) {
  const differs = data.differs.length ? [el("h3", {}, "What differs"), table(["key", ...data.runs.map((run) => run.name)], data.differs)] : [];
  const files = data.runs.map((run) => el("details", {}, el("summary", {}, `${run.name}: experiment.toml`), el("pre", { tabindex: 0 }, run.experiment),
    table(["environment", ""], Object.entries(run.environment))));
  const csv = download("rounds.csv", () => [["run", "round", "score_mean", "score_std", "score_p10", "score_worst", "score_after_training", "loss", "training_loss", "mib_down", "mib_up", "metric"],
    ...data.runs.flatMap((run) => run.curve.map((p) => [run.name, p.round, p.mean, p.std, p.p10, p.worst, p.after, p.loss, p.training_loss, p.down, p.up, run.metric.name]))]);
  return [...differs, ...files, el("h3", {}, "The numbers"), el("p", {}, csv)];
}

const SECTIONS = [["summary", "Summary", summarySection], ["curves", "Learning curves", curvesSection], ["clients", "Clients", clientsSection], ["metrics", "Metrics", metricsSection],
  ["alpha", "Who borrows from whom", alphaSection], ["self", "Self-weight", selfSection], ["federation", "Federation", federationSection],
  ["traffic", "Traffic", trafficSection], ["time", "Time", timeSection], ["faults", "Faults", faultsSection], ["setting", "Setting and numbers", settingSection]];

function state(data) {
  const going = data.runs.filter((run) => !run.finished);
  document.getElementById("state").textContent = going.length ? `not finished: ${going.map((run) => `${run.name}, round ${run.played} of ${run.rounds}`).join("; ")}` : "";
}

function render(data) {
  const [first] = data.runs, heading = several(data) ? `${data.runs.length} runs compared` : first.name;
  document.getElementById("title").textContent = heading;
  document.title = `${heading} – pfedla`;
  document.getElementById("subtitle").textContent = [...new Set(data.runs.map((run) => `${run.where}, seed ${run.seed}`))].join(" · ");
  document.getElementById("warnings").replaceChildren(...[...new Set(data.runs.flatMap((run) => run.warnings))].map((line) => el("p", { class: "warning" }, line)));
  state(data);
  const made = SECTIONS.map(([id, title, make]) => [id, title, make(data)]).filter(([, , parts]) => parts?.length);
  document.getElementById("sections").replaceChildren(...made.map(([id, title]) => el("a", { href: `#${id}` }, title)));
  main.replaceChildren(...made.map(([id, title, parts]) => el("section", { id, "aria-labelledby": `${id}-title` }, el("h2", { id: `${id}-title` }, title), ...parts)));
}

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  try { localStorage.setItem("pfedla-theme", name); } catch { /* a page of a file may have no storage */ }
}
let stored = null;
try { stored = localStorage.getItem("pfedla-theme"); } catch { /* the same */ }
document.documentElement.dataset.theme = stored || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
document.getElementById("theme").addEventListener("click", () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));

const data = JSON.parse(document.getElementById("data").textContent);
render(data);
if (data.live) {
  let tag = data.live, shown = data;
  const ask = async () => {
    try {
      const answer = await fetch("data.json", { headers: { "If-None-Match": tag }, cache: "no-store" });
      if (answer.status === 200) {
        const place = scrollY, focused = document.activeElement?.id;
        const open = [...document.querySelectorAll("details")].map((one) => one.open);
        shown = await answer.json();
        render(shown);
        tag = answer.headers.get("ETag");
        document.querySelectorAll("details").forEach((one, n) => { one.open = open[n] ?? false; });
        if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
        scrollTo(0, place);
      } else if (answer.status === 304) {
        state(shown); // it may have been away
      } else {
        document.getElementById("state").textContent = `pfedla watch cannot read the run any more (${answer.statusText}); this is what was known last`;
      }
    } catch {
      document.getElementById("state").textContent = "pfedla watch does not answer any more; this is what was known last";
    }
    setTimeout(ask, 1500);
  };
  setTimeout(ask, 1500);
}
