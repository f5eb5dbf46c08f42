// Who borrows which layer from whom: a heat map of alpha by layer and round.

const chosen = { run: 0, layer: null, order: "by label distribution", snapshot: null, stretch: false, receiver: null, playing: false }; // survives a refresh

function unpack(alpha) {
  const bytes = Uint8Array.from(atob(alpha.values), (letter) => letter.charCodeAt(0));
  return new Uint16Array(bytes.buffer);
}

function alphaSection(data) {
  const runs = data.runs.filter((run) => run.alpha?.rounds.length);
  const large = data.runs.filter((run) => run.alpha && !run.alpha.rounds.length);
  const parts = large.map((run) => el("p", { class: "note" }, `${run.name}: the weights of so many clients do not fit on a page; alpha.safetensors in its folder has them.`));
  if (!runs.length) return parts.length ? parts : null;
  const values = runs.map((run) => unpack(run.alpha));
  const holder = el("div");

  const draw = () => {
    chosen.run = Math.min(chosen.run, runs.length - 1);
    const run = runs[chosen.run], alpha = run.alpha, size = alpha.names.length, layers = alpha.layers.length;
    const own = alpha.self.mean.map((means) => means.at(-1));
    chosen.layer = Math.min(chosen.layer ?? own.indexOf(Math.max(...own)), layers - 1); // first the most personal one
    if (!(chosen.order in alpha.orders)) chosen.order = "as numbered";
    const order = alpha.orders[chosen.order], last = alpha.rounds.length - 1;
    const snapshot = () => (chosen.snapshot === null ? last : Math.min(chosen.snapshot, last));
    const at = (receiver, layer, sender, when = snapshot()) => values[chosen.run][((when * size + receiver) * layers + layer) * size + sender] / 65535;
    const senders = el("ol", { class: "senders" }), readout = el("p", { id: "readout", "aria-live": "polite" });
    const map = el("div", { id: "alpha-map" }), ends = el("div"), whose = el("h3", {});
    const named = (client) => `client ${alpha.names[client]}`;

    const point = (row, column, x, y) => {
      const [receiver, sender] = [order[row], order[column]], value = weight(at(receiver, chosen.layer, sender));
      const whom = receiver === sender ? "itself" : named(sender);
      const text = `${named(receiver)} takes ${value} of ${alpha.layers[chosen.layer]} from ${whom}, after round ${alpha.rounds[snapshot()]}`;
      readout.textContent = text;
      showTip(text, x, y);
      chosen.receiver = receiver;
      list();
    };
    const list = () => {
      const receiver = Math.min(chosen.receiver ?? order[0], size - 1);
      const taken = order.map((client) => [client, at(receiver, chosen.layer, client)]).sort((a, b) => b[1] - a[1]).slice(0, 8);
      whose.textContent = `${named(receiver)} takes ${alpha.layers[chosen.layer]} from`;
      senders.replaceChildren(...taken.map(([client, part]) => el("li", { style: `--part:${100 * part}%` }, el("span", {}, client === receiver ? "itself" : named(client)), weight(part))));
    };
    const hint = () => {
      hideTip();
      readout.textContent ||= "Point at a cell, or move over the map with the arrow keys: the row receives, the column sends.";
    };
    const top = () => {
      if (!chosen.stretch) return 1;
      let most = 0;
      for (let row = 0; row < size; row++)
        for (let column = 0; column < size; column++) if (row !== column) most = Math.max(most, at(row, chosen.layer, column));
      return most || 1;
    };
    const thumbnails = alpha.layers.map((layer, position) => {
      const canvas = el("canvas", { "aria-hidden": "true" });
      return { canvas, button: el("button", { type: "button", onclick: () => { chosen.layer = position; refresh(); } }, canvas, layer) };
    });
    const layerSelect = el("select", { id: "alpha-layer", onchange: (event) => { chosen.layer = +event.target.value; refresh(); } },
      ...alpha.layers.map((layer, position) => el("option", { value: position }, layer)));
    const shownRound = el("output", { id: "alpha-shown" });
    const slider = el("input", { type: "range", id: "alpha-round", min: 0, max: last, step: 1, value: snapshot(),
      oninput: (event) => { chosen.snapshot = +event.target.value === last ? null : +event.target.value; refresh(); } });
    let timer = null;
    const play = el("button", { type: "button", id: "alpha-play", onclick: () => (chosen.playing ? stop() : start()) }, "▶ Play");
    const stop = () => { clearInterval(timer); chosen.playing = false; play.textContent = "▶ Play"; };
    const start = () => {
      chosen.snapshot = snapshot() === last ? 0 : snapshot();
      chosen.playing = true;
      play.textContent = "❚❚ Stop";
      timer = setInterval(() => {
        if (!map.isConnected) return clearInterval(timer); // drawn anew: the new map goes on
        if (snapshot() === last) return stop();
        chosen.snapshot = snapshot() + 1 === last ? null : snapshot() + 1;
        refresh();
      }, Math.max(60, 4000 / (last + 1)));
      refresh();
    };
    const refresh = () => {
      const most = top(), say = `Weights of ${alpha.layers[chosen.layer]} after round ${alpha.rounds[snapshot()]}: row receives, column sends`;
      layerSelect.value = chosen.layer;
      slider.value = snapshot();
      slider.setAttribute("aria-valuetext", `after round ${alpha.rounds[snapshot()]}`);
      shownRound.textContent = `after round ${alpha.rounds[snapshot()]}`;
      const names = order.map((client) => alpha.names[client]);
      const focused = map.contains(document.activeElement);
      const drawn = heatMap(size, size, (row, column) => at(order[row], chosen.layer, order[column]) / most, { label: say, point, leave: hint });
      map.replaceChildren(labelled(drawn, names, names, ["receives", "sends"]));
      if (focused) drawn.focus({ preventScroll: true });
      ends.replaceChildren(scale("0", `${most === 1 ? "1" : weight(most)} (square-root scale)`));
      thumbnails.forEach(({ canvas, button }, position) => {
        paint(canvas, size, size, (row, column) => at(order[row], position, order[column]) / most);
        button.setAttribute("aria-pressed", position === chosen.layer);
      });
      readout.textContent = "";
      list();
      hint();
    };
    const controls = el("div", { class: "controls" },
      runs.length > 1 ? el("label", {}, "Run", el("select", { id: "alpha-run", onchange: (event) => { stop(); chosen.run = +event.target.value; draw(); } },
        ...runs.map((one, position) => el("option", { value: position, selected: position === chosen.run }, one.name)))) : null,
      el("label", {}, "Layer", layerSelect),
      el("label", {}, "Clients", el("select", { id: "alpha-order", onchange: (event) => { chosen.order = event.target.value; draw(); } },
        ...Object.keys(alpha.orders).map((name) => el("option", { value: name, selected: name === chosen.order }, name)))),
      el("label", { class: "grow" }, el("span", {}, "Round: ", shownRound), slider),
      last ? play : null,
      el("label", { class: "tick" }, el("input", { type: "checkbox", id: "alpha-stretch", checked: chosen.stretch,
        onchange: (event) => { chosen.stretch = event.target.checked; refresh(); } }), "colours up to the largest weight between two clients"));
    const csv = download("alpha.csv", () => [["receiver", "layer", "sender", "weight", "round"],
      ...alpha.names.flatMap((receiver, i) => alpha.layers.flatMap((layer, l) => alpha.names.map((sender, j) => [receiver, layer, sender, at(i, l, j), alpha.rounds[snapshot()]])))]);
    const thinned = alpha.rounds.length < alpha.snapshots ? `${alpha.rounds.length} of the run's ${alpha.snapshots} snapshots are on this page; ` : "";
    holder.replaceChildren(controls, el("div", { class: "layers", role: "group", "aria-label": "Layer" }, ...thumbnails.map((one) => one.button)),
      el("div", { class: "explorer" }, el("div", { class: "map" }, map, ends), el("div", { class: "beside" }, readout, whose, senders)),
      el("p", { class: "note" }, `${thinned}weights are rounded to 1/65,535. Exact ones: alpha.safetensors in the run folder.`), el("p", {}, csv));
    refresh();
    if (chosen.playing) snapshot() === last ? stop() : start();
  };
  draw();
  return [el("p", {}, "Row i shows from whom client i takes the layer: the diagonal is what it keeps of its own, bright blocks beside it are clients who learn from each other."), ...parts, holder];
}

function selfSection(data) {
  const runs = data.runs.filter((run) => run.alpha);
  if (!runs.length) return null;
  const parts = runs.map((run) => {
    const own = run.alpha.self;
    const series = run.alpha.layers.map((layer, position) => ({
      name: layer, colour: colour(position), points: own.rounds.map((round, n) => [round, own.mean[position][n]]),
      band: run.alpha.layers.length > 6 ? [] : own.rounds.map((round, n) => [round, own.low[position][n], own.high[position][n]]),
    }));
    const drawing = chart(series, { label: `Self-weight of each layer over the rounds, ${run.name}`, xLabel: "round", whole: true, yRange: [0, 1],
      yText: (value, exact) => (exact ? value.toFixed(3) : value.toFixed(1)), xText: (round) => `after round ${round}`, legend: true });
    return el("div", {}, runs.length > 1 ? el("h3", {}, run.name) : null, drawing);
  });
  return [el("p", {}, "How much of each layer the clients keep of their own: 1 is a client on its own, 1 / number of clients an even share. Line: mean of the clients; band: lowest to highest."), ...parts];
}
