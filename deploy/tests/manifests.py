"""What is wrong with manifests: each by its schema, and all together. It is told as a list of texts."""

import json
import re
import subprocess
from functools import cache
from pathlib import Path

import jsonschema
import kubernetes_validate
import yaml
from kubernetes_validate import utils

DEPLOY = Path(__file__).resolve().parents[1]
KUBERNETES = "1.37"
# What LeaderWorkerSet gives each container.
LWS_VARIABLES = {"LWS_LEADER_ADDRESS", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX"}
# It reads a megabyte for each object otherwise.
utils.schema_contents = cache(utils.schema_contents)
# Alarms that never end where there is none.
OF_A_ROUTER = {"KvferryNoPair", "KvferryNotRegistered"}
METRIC = re.compile(r"\b(?:vllm:)?kvferry_\w+")


def render(folder: str) -> list[dict]:
    done = subprocess.run(["kubectl", "kustomize", DEPLOY / folder], capture_output=True, text=True)
    if done.returncode:
        raise ValueError(done.stderr)
    return list(yaml.safe_load_all(done.stdout))


@cache
def document(name: str) -> str:
    return (DEPLOY.parent / "docs" / name).read_text()


@cache
def section(of: str, *titles: str) -> str:
    """A section of a document, or of a section of it: up to the next title of its level or above."""
    text = document(of)
    for title in titles:
        level = len(title.split(" ")[0])
        text = re.split(rf"^#{{1,{level}}} ", text.split(f"\n{title}\n", 1)[1], maxsplit=1, flags=re.M)[0]
    return text


def column(text: str) -> set[str]:
    """The words in backticks in the first column of the tables in a text."""
    return {word for row in re.findall(r"^\| (.*?) \|", text, re.M) for word in re.findall(r"`([^`]+)`", row)}


@cache
def metrics() -> dict[str, set[str]]:
    """Those that hosts, routers and vLLM tell, with their labels."""
    parts = ("### Of vLLM", "### Of the host", "### Of the router")
    text = "".join(section("operations.md", "## Metrics", part) for part in parts)
    found: dict[str, set[str]] = {}
    for metric, labels in re.findall(rf"({METRIC.pattern})(?:{{(.*?)}})?", text):
        found.setdefault(metric, set()).update(labels.split(",") if labels else ())
    return found


@cache
def connector_keys() -> set[str]:
    limits = section("connector.md", "### Times and limits")
    return column(section("connector.md", "## Keys of `kv_connector_extra_config`").replace(limits, ""))


@cache
def router_flags() -> set[str]:
    """Those of the table, of which each is an argument in the source, too."""
    words = column(section("operations.md", "## Configuration of the router"))
    flags = {word.split(" ")[0] for word in words if word.startswith("--")}
    source = "".join(path.read_text() for path in sorted((DEPLOY.parent / "host/src").rglob("*.rs")))
    return {flag for flag in flags if re.search(rf"\b{flag[2:].replace('-', '_')}: ", source)}


@cache
def host_variables() -> set[str]:
    keys = column(section("operations.md", "## Configuration of the host"))
    return {f"KVFERRY_HOST_{key.upper()}" for key in keys} | {"KVFERRY_SECRET_FILE"}


@cache
def schemas() -> dict:
    return yaml.safe_load((DEPLOY / "schemas/kinds.yaml").read_text())


def name(thing: dict) -> str:
    return f"{thing.get('kind')} {thing.get('metadata', {}).get('name')}"


def invalid(value, kind: str) -> list[str]:
    """By a schema of ours."""
    errors = jsonschema.Draft202012Validator(schemas()[kind]).iter_errors(value)
    return [f"{kind}: {error.json_path}: {error.message}" for error in errors]


def known(thing: dict) -> list[str]:
    """By a schema of Kubernetes, in which what it does not say is an error."""
    try:
        kubernetes_validate.validate(thing, KUBERNETES, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [f"{name(thing)}: {error.json_path}: {error.message}"]
    except kubernetes_validate.SchemaNotFoundError as error:
        return [f"{name(thing)}: {error.message}"]
    return []


def templates(thing: dict) -> list[dict]:
    """Its pod templates."""
    spec = thing.get("spec", {})
    if thing["kind"] == "Deployment":
        return [spec.get("template", {})]
    if thing["kind"] == "LeaderWorkerSet":
        group = spec.get("leaderWorkerTemplate", {})
        return [group[key] for key in ("leaderTemplate", "workerTemplate") if key in group]
    if thing["kind"] == "RayService":
        cluster = spec.get("rayClusterConfig", {})
        groups = [cluster.get("headGroupSpec", {}), *cluster.get("workerGroupSpecs", [])]
        return [group["template"] for group in groups if "template" in group]
    return []


def dashboards(thing: dict) -> list[str]:
    is_one = thing["kind"] == "ConfigMap" and "grafana_dashboard" in thing["metadata"].get("labels", {})
    return list(thing["data"].values()) if is_one else []


def by_schema(thing: dict) -> list[str]:
    kind = f"{thing.get('apiVersion')} {thing.get('kind')}"
    if kind not in schemas():
        found = known(thing)
    else:
        found = invalid(thing, kind)
        for template in templates(thing):
            found += known({"apiVersion": "v1", "kind": "PodTemplate", "template": template})
    for text in dashboards(thing) if not found else []:
        found += invalid(json.loads(text), "dashboard")
    if thing["kind"] == "RayService" and not found:
        found += invalid(yaml.safe_load(thing["spec"]["serveConfigV2"]), "serveConfigV2")
    return found


@cache
def by_schema_once(thing: str) -> list[str]:
    """Of one in JSON, which is in many fleets."""
    return by_schema(json.loads(thing))


def selects(selector: dict, labels: dict) -> bool:
    operators = {
        "In": lambda it: labels.get(it["key"]) in it["values"],
        "NotIn": lambda it: labels.get(it["key"]) not in it["values"],
        "Exists": lambda it: it["key"] in labels,
        "DoesNotExist": lambda it: it["key"] not in labels,
    }
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items()) and all(
        operators[it["operator"]](it) for it in selector.get("matchExpressions", [])
    )


class Fleet:
    """Objects that are applied together."""

    def __init__(self, things: list[dict]):
        self.things = things
        self.found: list[str] = []
        # Labels and specification of each kind of pod, and whose it is.
        self.pods = [
            (template.get("metadata", {}).get("labels", {}), template["spec"], name(thing))
            for thing in things
            for template in templates(thing)
        ]

    def wrong(self, thing: dict | str, text: str) -> None:
        self.found.append(f"{thing if isinstance(thing, str) else name(thing)}: {text}")

    def of(self, kind: str) -> list[dict]:
        return [thing for thing in self.things if thing["kind"] == kind]

    def named(self, kind: str, called: str) -> dict | None:
        return next((thing for thing in self.of(kind) if thing["metadata"]["name"] == called), None)

    def selected(self, thing: dict, selector: dict) -> list[dict]:
        found = [spec for labels, spec, _ in self.pods if selects(selector, labels)]
        if not found:
            self.wrong(thing, f"selects no pod: {json.dumps(selector)}")
        return found

    def has_port(self, thing: dict | str, pods: list[dict], port: str | int) -> None:
        if not any(port in (it["name"], it["containerPort"]) for pod in pods for it in ports(pod)):
            self.wrong(thing, f"no pod of it has port {port}")

    def problems(self) -> list[str]:
        self.found = [text for thing in self.things for text in by_schema_once(json.dumps(thing))]
        # What follows relies on the form.
        if not self.found:
            self.selectors()
            self.references()
            for _, pod, of in self.pods:
                self.pod(pod, of)
            self.observed()
        return self.found

    def selectors(self) -> None:
        for thing in self.of("Deployment"):
            if not selects(thing["spec"]["selector"], thing["spec"]["template"]["metadata"]["labels"]):
                self.wrong(thing, "does not select its own pods")
        for thing in self.of("Service"):
            pods = self.selected(thing, {"matchLabels": thing["spec"]["selector"]})
            for port in thing["spec"]["ports"]:
                self.has_port(thing, pods, port.get("targetPort", port["port"]))
        for thing in self.of("PodDisruptionBudget"):
            self.selected(thing, thing["spec"]["selector"])
        for thing in self.of("NetworkPolicy"):
            pods = self.selected(thing, thing["spec"]["podSelector"])
            for rule in thing["spec"]["ingress"]:
                for port in rule.get("ports", []):
                    self.has_port(thing, pods, port["port"])
                for peer in rule.get("from", []):
                    if "namespaceSelector" not in peer:
                        self.selected(thing, peer["podSelector"])
        for thing in self.of("PodMonitor"):
            pods = self.selected(thing, thing["spec"]["selector"])
            for endpoint in thing["spec"]["podMetricsEndpoints"]:
                # Of a kind of pods that has none, Prometheus takes none.
                self.has_port(thing, pods, endpoint["port"])
        for thing in self.of("InferencePool"):
            pods = self.selected(thing, thing["spec"]["selector"])
            for pod in pods:
                self.has_port(thing, [pod], thing["spec"]["targetPorts"][0]["number"])

    def references(self) -> None:
        for thing in self.of("HorizontalPodAutoscaler"):
            target = thing["spec"]["scaleTargetRef"]
            scaled = self.named(target["kind"], target["name"])
            if scaled is None:
                self.wrong(thing, f"there is no {target['kind']} {target['name']}")
            elif "replicas" in scaled["spec"]:
                self.wrong(scaled, "replicas undo what its autoscaler did, whenever it is applied")
        for thing in self.of("HTTPRoute"):
            for rule in thing["spec"]["rules"]:
                for to in rule["backendRefs"]:
                    if self.named(to.get("kind", "Service"), to["name"]) is None:
                        self.wrong(thing, f"there is no {to.get('kind', 'Service')} {to['name']}")

        for thing in self.of("LeaderWorkerSet"):
            text, size = json.dumps(thing), thing["spec"]["leaderWorkerTemplate"]["size"]
            ranks, here = (
                int(re.search(rf"--data-parallel-size{of}=(\d+)", text)[1]) for of in ("", "-local")
            )
            if ranks != here * size:
                self.wrong(thing, f"has ranks for {ranks // here} pods, and {size} of them")
        for thing in self.of("RayService"):
            for application in yaml.safe_load(thing["spec"]["serveConfigV2"])["applications"]:
                for config in application["args"].values():
                    self.transfer(name(thing), config["engine_kwargs"]["kv_transfer_config"])

    def pod(self, pod: dict, of: str) -> None:
        volumes = {it["name"] for it in pod.get("volumes", [])}
        for it in pod.get("volumes", []):
            self.volume(it, of)
        for container in [*pod.get("initContainers", []), *pod["containers"]]:
            for mount in container.get("volumeMounts", []):
                if mount["name"] not in volumes:
                    self.wrong(of, f"there is no volume {mount['name']}")
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                if probe in container:
                    self.has_port(of, [{"containers": [container]}], container[probe]["httpGet"]["port"])
            if not re.fullmatch(r"[a-z][a-z0-9-]*", container["image"]):
                self.wrong(of, f"image {container['image']}: a plain name, which `images` replaces")
            self.confined(of, pod, container)
            self.program(of, pod, container)

    def volume(self, volume: dict, of: str) -> None:
        if "configMap" in volume and self.named("ConfigMap", volume["configMap"]["name"]) is None:
            self.wrong(of, f"there is no ConfigMap {volume['configMap']['name']}")
        if "secret" in volume:
            if f" {volume['secret']['secretName']} " not in document("kubernetes.md"):
                self.wrong(of, f"docs/kubernetes.md makes no secret {volume['secret']['secretName']}")
            if volume["secret"].get("defaultMode", 0o644) & 0o027:
                self.wrong(of, "others may read the fleet's secret: kvferry refuses it")

    def confined(self, of: str, pod: dict, container: dict) -> None:
        own, common = container.get("securityContext", {}), pod.get("securityContext", {})
        if own.get("allowPrivilegeEscalation", True) or own.get("capabilities", {}).get("drop") != ["ALL"]:
            self.wrong(of, f"container {container['name']} keeps privileges")
        if not (own.get("runAsNonRoot") or common.get("runAsNonRoot")):
            self.wrong(of, f"container {container['name']} may be root")
        if common.get("seccompProfile", {}).get("type") != "RuntimeDefault":
            self.wrong(of, f"container {container['name']} may make each system call")

    def program(self, of: str, pod: dict, container: dict) -> None:
        variables, given = self.environment(of, container)
        args = []
        for arg in container.get("args", []):
            args.append(expanded(arg, given, lambda lost: self.wrong(of, f"there is no variable {lost}")))
        flags = dict(arg.partition("=")[::2] for arg in args if arg.startswith("--"))
        ends = 0
        if container.get("command") == ["kvferry", "router"]:
            known_flags, ends = router_flags(), float(flags.get("--drain-timeout", 600))
            self.serves_on(of, container, delay := float(flags.get("--shutdown-delay", 0)))
            ends += delay
        elif container.get("command") == ["vllm", "serve"]:
            known_flags, ends = set(schemas()["flags"]["vllm"]), float(flags.get("--shutdown-timeout", 0))
            self.server(of, container, flags, given)
        else:
            known_flags = set(schemas()["flags"].get(container["image"], []))
        for flag in flags.keys() - known_flags:
            self.wrong(of, f"{container['name']} has no flag {flag}")
        for variable in variables:
            if variable.startswith("KVFERRY_") and variable not in host_variables():
                self.wrong(of, f"kvferry has no variable {variable}")
        sleeps = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        if pod.get("terminationGracePeriodSeconds", 30) <= sleeps + ends:
            self.wrong(of, f"terminationGracePeriodSeconds has to be more than {sleeps} + {ends:g}")

    def serves_on(self, of: str, container: dict, delay: float) -> None:
        """A router that ends is sent to until the next one is ready."""
        probe = container.get("readinessProbe", {})
        fails = probe.get("periodSeconds", 10) * probe.get("failureThreshold", 3)
        if not delay:
            self.wrong(of, "without --shutdown-delay it refuses requests before the next one is up")
        elif fails < delay:
            self.wrong(of, f"readinessProbe fails within {fails} s, before --shutdown-delay ({delay:g} s) is over")

    def environment(self, of: str, container: dict) -> tuple[list[str], dict[str, str]]:
        """Variables of its own, and the values of all, in so far as they are known."""
        given = dict.fromkeys(LWS_VARIABLES, "10.0.0.1") if of.startswith("LeaderWorkerSet") else {}
        for source in container.get("envFrom", []):
            config = self.named("ConfigMap", source["configMapRef"]["name"])
            if config is None:
                self.wrong(of, f"there is no ConfigMap {source['configMapRef']['name']}")
            given |= (config or {}).get("data", {})
        for it in container.get("env", []):
            value = it.get("value", "10.0.0.2")
            late = f"{it['name']} is given before"
            given[it["name"]] = expanded(
                value, given, lambda lost, late=late: self.wrong(of, f"{late} {lost}")
            )
        return [it["name"] for it in container.get("env", [])], given

    def server(self, of: str, container: dict, flags: dict, given: dict) -> None:
        """A server of vLLM."""
        try:
            keys = self.transfer(of, json.loads(flags.get("--kv-transfer-config", "null")))
        except ValueError as error:
            return self.wrong(of, f"--kv-transfer-config: {error}")
        if keys.get("host_ip") != given.get("POD_IP"):
            self.wrong(of, "host_ip is not the address of the pod")
        own = {it["containerPort"] for it in container.get("ports", []) if it["name"] == "http"}
        told = {int(flags["--port"]), int(keys.get("http_port", flags["--port"]))}
        if "--headless" not in flags and told != own:
            self.wrong(of, "http_port, --port and the port `http` differ")
        if "KVFERRY_HOST_METRICS" in given and int(flags.get("--data-parallel-size", 1)) > 1:
            self.wrong(of, "KVFERRY_HOST_METRICS: the hosts of several DP ranks cannot share a port")
        if "proxy_ip" in keys:
            self.discovery(of, keys)
        elif self.named("Deployment", "kvferry-router") is not None:
            self.wrong(of, "it registers with no router")

    def transfer(self, of: str, transfer) -> dict:
        """Checks vLLM's `kv_transfer_config`, and returns the keys for the connector."""
        found = invalid(transfer, "transfer")
        self.found += [f"{of}: {text}" for text in found]
        keys = {} if found else transfer["kv_connector_extra_config"]
        for key in keys.keys() - connector_keys():
            self.wrong(of, f"kv_connector_extra_config has no key {key}")
        return keys

    def discovery(self, of: str, keys: dict) -> None:
        service = self.named("Service", keys["proxy_ip"])
        if service is None:
            return self.wrong(of, f"there is no Service {keys['proxy_ip']}")
        if keys.get("proxy_ping_port") not in [it["port"] for it in service["spec"]["ports"]]:
            self.wrong(of, f"Service {keys['proxy_ip']} has no port {keys.get('proxy_ping_port')}")
        if not service["spec"].get("publishNotReadyAddresses"):
            self.wrong(service, "a router is ready only when it is registered with")

    def observed(self) -> None:
        """What is said of metrics."""
        for thing in self.of("HorizontalPodAutoscaler"):
            for metric in thing["spec"]["metrics"]:
                self.documented(thing, metric["external"]["metric"]["name"])
        for thing in self.of("PrometheusRule"):
            rules = [rule for group in thing["spec"]["groups"] for rule in group["rules"]]
            has_router = self.named("Deployment", "kvferry-router") is not None
            if rules != [rule for rule in alarms() if has_router or rule["alert"] not in OF_A_ROUTER]:
                self.wrong(thing, "its rules are not those of docs/operations.md")
            for rule in rules:
                self.query(thing, rule["expr"])
        for thing in self.things:
            for text in dashboards(thing):
                for target in (target for panel in json.loads(text)["panels"] for target in panel["targets"]):
                    self.query(thing, target["expr"])

    def query(self, thing: dict, expression: str) -> None:
        """Metrics and labels that are there, or that Prometheus gives."""
        given = {"namespace", "pod", "le"}
        for metric, labels in re.findall(rf"({METRIC.pattern})(?:{{(.*?)}})?", expression):
            for label in set(re.findall(r"(\w+)[=!]", labels)) - self.documented(thing, metric) - given:
                self.wrong(thing, f"{metric} has no label {label}")
            given |= self.documented(thing, metric)
        for label in set(re.findall(r"\w+", " ".join(re.findall(r"by \((.*?)\)", expression)))) - given:
            self.wrong(thing, f"{expression}: there is no label {label}")

    def documented(self, thing: dict, metric: str) -> set[str]:
        """The labels of a metric."""
        names = [name for name in (metric, re.sub("_(bucket|sum|count)$", "", metric)) if name in metrics()]
        if not names:
            self.wrong(thing, f"docs/operations.md has no metric {metric}")
        return metrics()[names[0]] if names else set()


def alarms() -> list[dict]:
    rules = section("operations.md", "## Alarms").split("```yaml\n", 1)[1].split("```", 1)[0]
    return [rule for group in yaml.safe_load(rules)["groups"] for rule in group["rules"]]


def ports(pod: dict) -> list[dict]:
    containers = [*pod.get("initContainers", []), *pod["containers"]]
    return [port for container in containers for port in container.get("ports", [])]


def expanded(text: str, given: dict[str, str], lost) -> str:
    """With the variables that it names, as Kubernetes does it."""

    def value(match: re.Match) -> str:
        if match[1] not in given:
            lost(match[1])
        return given.get(match[1], match[0])

    return re.sub(r"\$\((\w+)\)", value, text)
