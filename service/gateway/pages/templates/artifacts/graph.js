// Draws a lowered graph: modules are closed boxes that open where one clicks. dagre says where boxes go.
"use strict";

(async () => {
  const SVG = "http://www.w3.org/2000/svg";
  const DRAWN = 600; // boxes at once: a layout of more takes seconds
  const AT_FIRST = 60;
  const HEIGHT = 40;
  const LETTER = 7.3; // pixels of the monospaced text

  const place = document.getElementById("graph");
  const svg = place.querySelector("svg");
  const about = document.getElementById("node");
  const answer = await fetch(location.href, { headers: { Accept: "application/json" } });
  if (!answer.ok) return;
  const { nodes } = await answer.json();
  place.hidden = false;

  // --- modules: a tree of paths ---------------------------------------------------------------------------------

  const users = nodes.map(() => []);
  nodes.forEach((node, position) => (node.inputs ?? []).forEach((used) => users[used].push(position)));
  const paths = nodes.map((node) => (node.module ? node.module.split(".") : []));
  const sizes = new Map(); // how many nodes a module holds, by its path
  for (const path of paths)
    for (let depth = 1; depth <= path.length; depth++) {
      const name = path.slice(0, depth).join(".");
      sizes.set(name, (sizes.get(name) ?? 0) + 1);
    }

  const opened = new Set();
  const boxOf = (position) => {
    // the outermost closed module around a node, else the node
    const path = paths[position];
    for (let depth = 1; depth <= path.length; depth++) {
      const name = path.slice(0, depth).join(".");
      if (!opened.has(name)) return name;
    }
    return position;
  };
  const boxes = () => new Set(nodes.map((_, position) => boxOf(position)));

  const open = (name) => {
    opened.add(name);
    if (boxes().size > DRAWN) {
      opened.delete(name);
      about.textContent = `${name} has ${counted(sizes.get(name))}: the picture has room for ${DRAWN} boxes. Close other modules first.`;
      return false;
    }
    return true;
  };
  for (const name of [...sizes.keys()].sort((a, b) => a.split(".").length - b.split(".").length)) {
    opened.add(name);
    if (boxes().size > AT_FIRST) {
      opened.delete(name);
      break;
    }
  }

  // --- the picture ----------------------------------------------------------------------------------------------

  const add = (parent, tag, attributes, text) => {
    const element = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    if (text !== undefined) element.textContent = text;
    return parent.appendChild(element);
  };
  const counted = (count) => `${count} node${count === 1 ? "" : "s"}`;
  const short = (text, most = 40) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);
  const lastOf = (path) => path.slice(path.lastIndexOf(".") + 1);
  const textsOf = (box) => {
    if (typeof box === "string") return [short(lastOf(box)), counted(sizes.get(box))];
    return [short(`${nodes[box].name} = ${nodes[box].target}`), short(nodes[box].type ?? "")];
  };

  let view = [0, 0, 100, 100];
  let whole = view;
  let chosen = null;
  const look = () => svg.setAttribute("viewBox", view.join(" "));
  const zoom = (factor, x = view[0] + view[2] / 2, y = view[1] + view[3] / 2) => {
    view = [x - (x - view[0]) * factor, y - (y - view[1]) * factor, view[2] * factor, view[3] * factor];
    look();
  };
  const fit = () => {
    view = whole;
    look();
  };
  /** Begin at the top, at a size that can be read. */
  const begin = () => {
    const width = Math.min(Math.max(whole[2], svg.clientWidth * 0.8), svg.clientWidth * 1.6);
    view = [whole[0] + (whole[2] - width) / 2, whole[1], width, (width * svg.clientHeight) / svg.clientWidth];
    look();
  };

  const draw = () => {
    const graph = new dagre.graphlib.Graph({ compound: true });
    graph.setGraph({ nodesep: 14, ranksep: 26, marginx: 10, marginy: 10 });
    graph.setDefaultEdgeLabel(() => ({}));
    const shown = nodes.map((_, position) => boxOf(position));
    for (const box of new Set(shown)) {
      const texts = textsOf(box);
      const width = Math.max(...texts.map((text) => text.length)) * LETTER + 20;
      graph.setNode(String(box), { box, texts, width, height: HEIGHT });
    }
    shown.forEach((box, position) => {
      const path = paths[position];
      let inside = String(box);
      for (let depth = typeof box === "string" ? box.split(".").length - 1 : path.length; depth; depth--) {
        const name = `open ${path.slice(0, depth).join(".")}`;
        if (!graph.hasNode(name)) graph.setNode(name, { open: path.slice(0, depth).join(".") });
        graph.setParent(inside, name);
        inside = name;
      }
      for (const used of nodes[position].inputs ?? [])
        if (shown[used] !== box) graph.setEdge(String(shown[used]), String(box));
    });
    dagre.layout(graph);
    svg.replaceChildren();
    const names = graph.nodes().sort((a, b) => depthOf(graph, a) - depthOf(graph, b));
    for (const name of names) if (graph.node(name).open !== undefined) drawOpen(graph.node(name));
    for (const edge of graph.edges()) {
      const points = graph.edge(edge).points.map((point) => `${point.x.toFixed(1)} ${point.y.toFixed(1)}`);
      add(svg, "path", { d: `M${points.join(" L")}` });
    }
    for (const name of names) if (graph.node(name).open === undefined) drawBox(graph.node(name));
    const { width, height } = graph.graph();
    whole = [0, 0, Math.max(width, 1), Math.max(height, 1)];
  };
  /** The box with this label is where one was. */
  const drawAgain = (label) => {
    draw();
    look();
    [...svg.children].find((each) => each.getAttribute("aria-label") === label)?.focus();
  };
  const depthOf = (graph, name) => (graph.parent(name) ? 1 + depthOf(graph, graph.parent(name)) : 0);

  const button = (kind, label, at, act) => {
    const group = add(svg, "g", { class: kind, role: "button", tabindex: 0, "aria-label": label });
    add(group, "rect", {
      ...{ x: at.x - at.width / 2, y: at.y - at.height / 2, width: at.width, height: at.height, rx: 6 },
    });
    group.addEventListener("focus", () => {
      const [x, y] = [at.x - view[0], at.y - view[1]];
      if (x > 0 && x < view[2] && y > 0 && y < view[3]) return;
      view = [at.x - view[2] / 2, at.y - view[3] / 2, view[2], view[3]];
      look();
    });
    group.addEventListener("click", (event) => {
      event.stopPropagation();
      if (!moved) act(group);
    });
    group.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      act(group);
    });
    return group;
  };
  const drawOpen = (at) => {
    const group = button("open", `close module ${at.open}`, at, () => {
      for (const name of [...opened]) if (name === at.open || name.startsWith(`${at.open}.`)) opened.delete(name);
      drawAgain(`open module ${at.open}, ${counted(sizes.get(at.open))}`);
    });
    add(group, "text", { x: at.x - at.width / 2 + 8, y: at.y - at.height / 2 + 15 }, short(lastOf(at.open)));
  };
  const drawBox = (at) => {
    const module = typeof at.box === "string";
    const kind = module ? "group" : nodes[at.box].target === "placeholder" ? "input" : "call";
    const label = module ? `open module ${at.box}, ${counted(sizes.get(at.box))}` : `node ${nodes[at.box].name}`;
    const group = button(kind, label, at, (element) => {
      if (!module) return tell(at.box, element);
      if (open(at.box)) drawAgain(`close module ${at.box}`);
    });
    add(group, "text", { x: at.x - at.width / 2 + 10, y: at.y - 3 }, at.texts[0]);
    add(group, "text", { x: at.x - at.width / 2 + 10, y: at.y + 12 }, at.texts[1]);
  };
  const tell = (position, element) => {
    chosen?.classList.remove("chosen");
    chosen = element;
    element.classList.add("chosen");
    const node = nodes[position];
    const names = (list) => list.map((each) => nodes[each].name).join(", ") || "none";
    const rows = { node: node.name, operator: node.target, value: node.type, module: node.module };
    Object.assign(rows, { line: node.line, takes: names(node.inputs ?? []), "is used by": names(users[position]) });
    about.replaceChildren(
      ...Object.entries(rows)
        .filter(([, text]) => text)
        .map(([name, text]) => {
          const row = document.createElement("p");
          const code = document.createElement("code");
          code.textContent = text;
          row.append(`${name} `, code);
          return row;
        }),
    );
  };

  // --- to move it -----------------------------------------------------------------------------------------------

  let from = null;
  let moved = false;
  const scale = () => Math.max(view[2] / svg.clientWidth, view[3] / svg.clientHeight);
  svg.addEventListener("pointerdown", (event) => {
    from = [event.clientX, event.clientY, ...view];
    moved = false;
  });
  addEventListener("pointermove", (event) => {
    if (!from) return;
    const [x, y] = [event.clientX - from[0], event.clientY - from[1]];
    moved ||= Math.hypot(x, y) > 4;
    if (!moved) return;
    view = [from[2] - x * scale(), from[3] - y * scale(), from[4], from[5]];
    look();
  });
  addEventListener("pointerup", () => (from = null));
  svg.addEventListener("wheel", (event) => {
    if (!event.ctrlKey) return; // the page scrolls
    event.preventDefault();
    zoom(event.deltaY > 0 ? 1.15 : 1 / 1.15);
  }, { passive: false });
  const does = {
    in: () => zoom(1 / 1.4),
    out: () => zoom(1.4),
    fit,
    close: () => {
      opened.clear();
      draw();
      begin();
    },
  };
  for (const each of place.querySelectorAll("button")) each.addEventListener("click", does[each.dataset.do]);
  const steps = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  svg.addEventListener("keydown", (event) => {
    const step = steps[event.key];
    if (!step) return;
    event.preventDefault();
    view = [view[0] + (step[0] * view[2]) / 8, view[1] + (step[1] * view[3]) / 8, view[2], view[3]];
    look();
  });

  draw();
  begin();
})();
