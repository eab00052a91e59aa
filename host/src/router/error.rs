//! Error objects as OpenAI's clients expect them.

use super::api::Api;
use super::fields::JsonFields;
use super::lax;
use super::retry_after::seconds;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use hyper::StatusCode;
use hyper::header::{CONTENT_TYPE, HeaderValue, RETRY_AFTER};
use kvferry_engine::core::message::Role;
use kvferry_engine::core::router::{NAMED_MODELS_MAX, Unavailable};
use serde::Serialize;
use std::sync::Arc;
use std::time::Duration;

/// Longest error object of an instance that clients get as it is, in bytes. Such errors are kept
/// until the request is answered, and are not charged.
pub(crate) const RELAYED_MAX: usize = 16 << 10;

/// Characters of a client's name for a model that it is shown.
const NAME_SHOWN: usize = 200;

#[derive(Serialize)]
struct ErrorBody<'a> {
    error: ErrorDetail<'a>,
}

#[derive(Serialize)]
struct ErrorDetail<'a> {
    message: &'a str,
    r#type: &'a str,
    param: Option<&'a str>,
    code: ErrorCode,
    #[serde(skip_serializing_if = "Option::is_none")]
    kvferry: Option<KvFailure<'a>>,
}

/// Why KV did not come, in the form in which instances tell it.
#[derive(Serialize)]
struct KvFailure<'a> {
    failed: KvFailureCause<'a>,
}

#[derive(Serialize)]
struct KvFailureCause<'a> {
    cause: &'a str,
    why: &'a str,
}

#[derive(Serialize)]
#[serde(untagged)]
enum ErrorCode {
    Status(u16),
    Word(&'static str),
}

impl<'a> ErrorDetail<'a> {
    fn new(status: StatusCode, message: &'a str) -> ErrorDetail<'a> {
        let kind = match status {
            StatusCode::NOT_FOUND => "NotFoundError",
            StatusCode::TOO_MANY_REQUESTS => "RateLimitError",
            StatusCode::SERVICE_UNAVAILABLE => "ServiceUnavailableError",
            StatusCode::BAD_GATEWAY | StatusCode::GATEWAY_TIMEOUT => "BadGatewayError",
            status if status.is_client_error() => "BadRequestError",
            _ => "InternalServerError",
        };
        let code = ErrorCode::Status(status.as_u16());
        ErrorDetail { message, r#type: kind, param: None, code, kvferry: None }
    }
}

/// What a client is told instead of an answer.
#[derive(Clone, Debug)]
pub(crate) struct HttpError {
    pub(crate) status: StatusCode,
    pub(crate) body: Bytes,
    /// Time after which the client may retry, if known.
    retry_after: Option<Duration>,
}

impl HttpError {
    /// `message` says what is wrong and what to do about it.
    pub(crate) fn new(status: StatusCode, message: &str) -> HttpError {
        HttpError::with_param(status, message, None)
    }

    /// KV did not come, for a `cause` in a word. `message` as above.
    pub(crate) fn kv_failed(status: StatusCode, cause: &str, message: &str) -> HttpError {
        let failed = KvFailureCause { cause, why: message };
        let detail = ErrorDetail::new(status, message);
        HttpError::with_detail(
            status,
            ErrorDetail { kvferry: Some(KvFailure { failed }), ..detail },
        )
    }

    /// The request is wrong; `param` names the field.
    pub(crate) fn bad(message: &str, param: &str) -> HttpError {
        let param = (!param.is_empty()).then_some(param);
        HttpError::with_param(StatusCode::BAD_REQUEST, message, param)
    }

    fn with_param(status: StatusCode, message: &str, param: Option<&str>) -> HttpError {
        HttpError::with_detail(status, ErrorDetail { param, ..ErrorDetail::new(status, message) })
    }

    fn with_detail(status: StatusCode, error: ErrorDetail<'_>) -> HttpError {
        let body = serde_json::to_vec(&ErrorBody { error }).expect("texts and numbers are JSON");
        HttpError { status, body: body.into(), retry_after: None }
    }

    /// Sets the time for the next try, unless the error has one.
    pub(crate) fn or_retry_after(mut self, span: Option<Duration>) -> HttpError {
        self.retry_after = self.retry_after.or(span);
        self
    }

    /// No instance serves `asked`; `served` are models that are served.
    pub(crate) fn no_model(asked: &str, served: &[Arc<str>]) -> HttpError {
        let asked: String = asked.chars().take(NAME_SHOWN).collect();
        let more = if served.len() >= NAMED_MODELS_MAX { ", and perhaps others" } else { "" };
        let message = format!(
            "no instance serves the model `{asked}`: ask for one of those that are served, {}{more}",
            served.join(", ")
        );
        HttpError::model_not_found(&message)
    }

    /// Instances of the other role serve `asked`; those of the role `missing` serve `served`
    /// instead.
    pub(crate) fn no_role(asked: &str, missing: Role, served: &[Arc<str>]) -> HttpError {
        let asked: String = asked.chars().take(NAME_SHOWN).collect();
        let more = if served.len() >= NAMED_MODELS_MAX { ", and perhaps others" } else { "" };
        let (missing, other) = match missing {
            Role::Prefill => ("prefill", "decode"),
            Role::Decode => ("decode", "prefill"),
        };
        let message = format!(
            "{other} instances serve the model `{asked}`, and no {missing} instance does: load it at a \
             {missing} instance, or ask for one that these serve, {}{more}",
            served.join(", ")
        );
        HttpError::model_not_found(&message)
    }

    fn model_not_found(message: &str) -> HttpError {
        let error = ErrorDetail {
            message,
            r#type: "invalid_request_error",
            param: Some("model"),
            code: ErrorCode::Word("model_not_found"),
            kvferry: None,
        };
        HttpError::with_detail(StatusCode::NOT_FOUND, error)
    }

    /// No instance could take a request within its time.
    pub(crate) fn unavailable(why: Unavailable) -> HttpError {
        let why = match why {
            Unavailable::Draining => {
                "the router drains and takes no new requests: send it to another"
            }
            Unavailable::Nobody => "no prefill and decode instance is registered",
            Unavailable::NoRole(Role::Prefill) => "no prefill instance is registered",
            Unavailable::NoRole(Role::Decode) => "no decode instance is registered",
            Unavailable::NoCommonMode => {
                "no prefill and decode instance have the same transfer mode and connector"
            }
            Unavailable::NoHost(Role::Prefill) => {
                "all prefill instances have lost their hosts: they do not register with the router"
            }
            Unavailable::NoHost(Role::Decode) => {
                "all decode instances have lost their hosts: they do not register with the router"
            }
            _ => {
                "no pair of instances takes requests: they failed lately, or have not answered yet"
            }
        };
        let message = format!(
            "{why}; /workers of --admin-addr has what is registered, /registrations/rejected what was \
             not taken"
        );
        HttpError::new(StatusCode::SERVICE_UNAVAILABLE, &message)
    }

    /// An instance's own words if they are an error object, else as the message of one.
    pub(crate) fn relayed(status: StatusCode, body: Bytes) -> HttpError {
        let is_object = |object: JsonFields| {
            object.get("error").is_some() || object.get("object") == Some(b"\"error\"")
        };
        let is_error =
            body.len() <= RELAYED_MAX && JsonFields::parse(body.clone()).is_ok_and(is_object);
        if is_error {
            return HttpError { status, body, retry_after: None };
        }
        let text = String::from_utf8_lossy(&body);
        let shown: String = text.chars().take(1000).collect();
        HttpError::new(status, &format!("the instance answered with status {status}: {shown}"))
    }

    /// What the error object says; nothing if an instance made one without a message.
    pub(crate) fn message(&self) -> String {
        let Ok(object) = JsonFields::parse(self.body.clone()) else { return String::new() };
        let error = object.object("error");
        let message = error.as_ref().and_then(|error| error.get("message"));
        let message = message.or_else(|| object.get("message")).and_then(lax::string);
        message.unwrap_or_default().into_owned()
    }

    /// The same as an event of a stream that had begun, and the end of the stream.
    pub(crate) fn event(&self, api: Api) -> Bytes {
        let [begin, end]: [&[u8]; 2] = match api {
            Api::Messages => [b"event: error\ndata: ", b"\n\n"],
            _ => [b"data: ", b"\n\ndata: [DONE]\n\n"],
        };
        let mut event = [begin, &self.clone().of(api).body, end].concat();
        // An instance may have sent its error in several lines, which would end the event. Within
        // the strings of JSON there are none.
        let body = begin.len()..event.len() - end.len();
        for byte in &mut event[body] {
            if matches!(byte, b'\r' | b'\n') {
                *byte = b' ';
            }
        }
        event.into()
    }

    /// The same error in the form of the path: on /v1/messages in Anthropic's.
    pub(crate) fn of(self, api: Api) -> HttpError {
        let is_told = |body: Bytes| {
            JsonFields::parse(body).is_ok_and(|object| object.get("type") == Some(b"\"error\""))
        };
        if api != Api::Messages || is_told(self.body.clone()) {
            return self;
        }
        let kind = match self.status.as_u16() {
            401 => "authentication_error",
            403 => "permission_error",
            404 => "not_found_error",
            413 => "request_too_large",
            429 => "rate_limit_error",
            503 => "overloaded_error",
            400..500 => "invalid_request_error",
            _ => "api_error",
        };
        let error = serde_json::json!({"type": kind, "message": self.message()});
        let body = serde_json::json!({"type": "error", "error": error}).to_string();
        HttpError { body: body.into(), ..self }
    }
}

impl IntoResponse for HttpError {
    fn into_response(self) -> Response {
        let mut response = Response::new(self.body.into());
        *response.status_mut() = self.status;
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if matches!(self.status, StatusCode::SERVICE_UNAVAILABLE | StatusCode::TOO_MANY_REQUESTS) {
            let span = self.retry_after.unwrap_or_default();
            headers.insert(RETRY_AFTER, HeaderValue::from(seconds(span)));
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    #[test]
    fn errors_of_messages_have_the_form_of_their_path() {
        let error = HttpError::bad("m", "p").of(Api::Messages);
        let form = r#"{"error":{"message":"m","type":"invalid_request_error"},"type":"error"}"#;
        assert_eq!(error.body, form);
        assert_eq!(error.event(Api::Messages), format!("event: error\ndata: {form}\n\n"));
        assert_eq!(error.of(Api::Messages).body, form);
    }

    #[test]
    fn error_of_several_lines_is_one_line_of_an_event() {
        let body = Bytes::from_static(b"{\n\"error\":\r\n\r\n{\"message\": \"a\\nb\"}\n\n}");
        let event = HttpError::relayed(StatusCode::BAD_GATEWAY, body).event(Api::Chat);
        let expected = "data: { \"error\":    {\"message\": \"a\\nb\"}  }\n\ndata: [DONE]\n\n";
        assert_eq!(event, expected);
    }

    #[test]
    fn what_instances_say_is_kept_only_if_it_is_an_error_object() {
        let relayed = |body: &'static str| {
            let refusal =
                HttpError::relayed(StatusCode::BAD_REQUEST, Bytes::from_static(body.as_bytes()));
            serde_json::from_slice::<Value>(&refusal.body).unwrap()
        };
        assert_eq!(relayed(r#"{"error":{"message":"m"}}"#)["error"]["message"], "m");
        assert_eq!(relayed(r#"{"object":"error","message":"m"}"#)["message"], "m");
        let long = format!("{{\"error\":{{\"message\":\"{}\"}}}}", "m".repeat(RELAYED_MAX));
        let cut = relayed(long.leak())["error"]["message"].as_str().unwrap().len();
        assert!((1000..1100).contains(&cut), "{cut}");
        for text in ["not json", "{}", "[1]", ""] {
            let object = relayed(text);
            let message = object["error"]["message"].as_str().unwrap();
            assert!(message.contains(text) && object["error"]["code"] == 400, "{object}");
        }
    }
}
