//! The messages, in Protocol Buffers. Fields that a later version adds are ignored, as that format has it.

use alloc::string::String;
use alloc::vec::Vec;

use prost::{Message, Oneof};

/// The most bytes of a datagram to ztunnel: it reads no more, and a longer one ends the connection.
pub const LARGEST_REQUEST: usize = 1024;
/// The most bytes accepted from ztunnel, whose longest message is an error's text.
pub const LARGEST_RESPONSE: usize = 4096;
/// The version of the protocol.
pub const VERSION: i32 = 1;

/// What ztunnel sends first.
#[derive(Clone, PartialEq, Eq, Message)]
struct ZdsHello {
    #[prost(int32, tag = "1")]
    version: i32,
}

#[derive(Clone, PartialEq, Eq, Message)]
struct WorkloadRequest {
    #[prost(oneof = "Request", tags = "1, 2, 3, 5")]
    payload: Option<Request>,
}

#[derive(Clone, PartialEq, Eq, Oneof)]
enum Request {
    #[prost(message, tag = "1")]
    Add(AddWorkload),
    #[prost(message, tag = "2")]
    Del(DelWorkload),
    #[prost(message, tag = "3")]
    SnapshotSent(SnapshotSent),
    #[prost(message, tag = "5")]
    Keep(KeepWorkload),
}

#[derive(Clone, PartialEq, Eq, Message)]
struct AddWorkload {
    #[prost(string, tag = "1")]
    uid: String,
    #[prost(message, optional, tag = "2")]
    workload_info: Option<WorkloadInfo>,
}

#[derive(Clone, PartialEq, Eq, Message)]
struct WorkloadInfo {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(string, tag = "2")]
    namespace: String,
    #[prost(string, tag = "3")]
    service_account: String,
}

/// The number of its field is not that of the other messages.
#[derive(Clone, PartialEq, Eq, Message)]
struct DelWorkload {
    #[prost(string, tag = "2")]
    uid: String,
}

#[derive(Clone, PartialEq, Eq, Message)]
struct KeepWorkload {
    #[prost(string, tag = "1")]
    uid: String,
}

#[derive(Clone, PartialEq, Eq, Message)]
struct SnapshotSent {}

#[derive(Clone, PartialEq, Eq, Message)]
struct WorkloadResponse {
    #[prost(oneof = "Response", tags = "1")]
    payload: Option<Response>,
}

#[derive(Clone, PartialEq, Eq, Oneof)]
enum Response {
    #[prost(message, tag = "1")]
    Ack(Ack),
}

#[derive(Clone, PartialEq, Eq, Message)]
struct Ack {
    #[prost(string, tag = "1")]
    error: String,
}

/// How ztunnel answers a message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ZtunnelReply {
    /// Done.
    Ack,
    /// It failed, with ztunnel's words. For an add ztunnel goes on trying by itself.
    Nack(String),
}

/// Why a datagram of ztunnel is not what the protocol has there.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// It is too long.
    #[error("a message has {0} bytes, at most {LARGEST_RESPONSE} are accepted")]
    TooLong(usize),
    /// It is not Protocol Buffers, or a field has another type.
    #[error("a message cannot be decoded: {0}")]
    Malformed(prost::DecodeError),
    /// It has no payload.
    #[error("a response has no payload")]
    Empty,
}

/// The version in a hello.
///
/// # Errors
/// It is not a hello.
pub fn hello(datagram: &[u8]) -> Result<i32, DecodeError> {
    decode::<ZdsHello>(datagram).map(|hello| hello.version)
}

/// What ztunnel answers.
///
/// # Errors
/// It is not an answer.
pub fn answer(datagram: &[u8]) -> Result<ZtunnelReply, DecodeError> {
    match decode::<WorkloadResponse>(datagram)?.payload {
        Some(Response::Ack(Ack { error })) if error.is_empty() => Ok(ZtunnelReply::Ack),
        Some(Response::Ack(Ack { error })) => Ok(ZtunnelReply::Nack(error)),
        None => Err(DecodeError::Empty),
    }
}

fn decode<M: Message + Default>(datagram: &[u8]) -> Result<M, DecodeError> {
    if datagram.len() > LARGEST_RESPONSE {
        return Err(DecodeError::TooLong(datagram.len()));
    }
    M::decode(datagram).map_err(DecodeError::Malformed)
}

/// A pod, whose namespace's descriptor comes with it.
#[must_use]
pub fn add(uid: &str, name: &str, namespace: &str, service_account: &str) -> Vec<u8> {
    let info = WorkloadInfo {
        name: name.into(),
        namespace: namespace.into(),
        service_account: service_account.into(),
    };
    request(Request::Add(AddWorkload { uid: uid.into(), workload_info: Some(info) }))
}

/// A pod to drop.
#[must_use]
pub fn del(uid: &str) -> Vec<u8> {
    request(Request::Del(DelWorkload { uid: uid.into() }))
}

/// A pod that exists, without a descriptor: what ztunnel has of it stays. Only in a snapshot.
#[must_use]
pub fn keep(uid: &str) -> Vec<u8> {
    request(Request::Keep(KeepWorkload { uid: uid.into() }))
}

/// The end of the snapshot: ztunnel drops what was not in it.
#[must_use]
pub fn snapshot_sent() -> Vec<u8> {
    request(Request::SnapshotSent(SnapshotSent {}))
}

fn request(payload: Request) -> Vec<u8> {
    WorkloadRequest { payload: Some(payload) }.encode_to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;

    /// A field of bytes: its number, wire type 2, length, content.
    fn field(number: u8, content: &[u8]) -> Vec<u8> {
        let length = u8::try_from(content.len()).expect("short");
        [&[number << 3 | 2, length], content].concat()
    }

    #[test]
    fn requests_have_the_numbers_of_the_protocol() {
        let info = [field(1, b"web"), field(2, b"shop"), field(3, b"account")].concat();
        assert_eq!(
            add("u-1", "web", "shop", "account"),
            field(1, &[field(1, b"u-1"), field(2, &info)].concat())
        );
        assert_eq!(del("u-1"), field(2, &field(2, b"u-1")));
        assert_eq!(snapshot_sent(), field(3, b""));
        assert_eq!(keep("u-1"), field(5, &field(1, b"u-1")));
    }

    #[test]
    fn hello_and_answers_are_read_by_these_numbers() {
        assert_eq!(hello(&[1 << 3, 1]), Ok(VERSION));
        assert_eq!(hello(b""), Ok(0));
        assert_eq!(answer(&field(1, b"")), Ok(ZtunnelReply::Ack));
        assert_eq!(answer(&field(1, &field(1, b"no"))), Ok(ZtunnelReply::Nack("no".into())));
        assert_eq!(answer(b""), Err(DecodeError::Empty));
        assert!(matches!(answer(b"\x0a\x05"), Err(DecodeError::Malformed(_))));
        assert_eq!(answer(&vec![0; LARGEST_RESPONSE + 1]), Err(DecodeError::TooLong(LARGEST_RESPONSE + 1)));
    }

    #[test]
    fn fields_of_later_versions_are_ignored() {
        let later = field(15, b"later");
        assert_eq!(hello(&[&[1 << 3, 1], later.as_slice()].concat()), Ok(VERSION));
        assert_eq!(answer(&[field(1, &later), later].concat()), Ok(ZtunnelReply::Ack));
    }
}
