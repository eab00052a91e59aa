"""HTTP, as much as the tests need."""

import http.client
import json

HOST = "127.0.0.1"


class Refused(Exception):
    """An answer that is not 200; carries the status and the body."""

    def __init__(self, status: int, body: str):
        super().__init__(f"{status}: {body}")
        self.status = status
        self.body = body


def get(port: int, path: str) -> int | None:
    """Status of a GET, `None` if nobody answers."""
    try:
        return exchange(port, "GET", path, None, {}, 5)[0]
    except OSError:
        return None


def post(port: int, path: str, body: dict, seconds: float, headers: dict | None = None) -> dict:
    """JSON answer to a JSON request; `OSError` if there is none in `seconds`, `Refused` if it is
    an error."""
    headers = {"Content-Type": "application/json"} | (headers or {})
    status, answer = exchange(port, "POST", path, json.dumps(body), headers, seconds)
    if status != 200:
        raise Refused(status, answer)
    return json.loads(answer)


def lines(port: int, path: str, body: dict, seconds: float):
    """The lines of a stream of events, as they come; errors as of `post`."""
    connection = http.client.HTTPConnection(HOST, port, timeout=seconds)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise Refused(answer.status, answer.read().decode())
        for line in answer:
            yield line.decode().rstrip()
    except http.client.HTTPException as error:
        raise OSError(f"POST {path}: {error!r}") from error
    finally:
        connection.close()


def metric(port: int, name: str, *labels: str) -> float:
    """Sum of a Prometheus series, of all that have these labels, each like `key="value"`."""
    _, text = exchange(port, "GET", "/metrics", None, {}, 10)
    lines = [line for line in text.splitlines() if line.startswith((name + "{", name + " "))]
    lines = [line for line in lines if all(label in line for label in labels)]
    if not lines:
        raise KeyError(f"no series {name} at port {port}")
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def exchange(port, method, path, body, headers, seconds) -> tuple[int, str]:
    connection = http.client.HTTPConnection(HOST, port, timeout=seconds)
    try:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    except http.client.HTTPException as error:
        raise OSError(f"{method} {path}: {error!r}") from error
    finally:
        connection.close()
