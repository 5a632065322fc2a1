//! DNS queries, from the calling thread's network namespace.

use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, TcpStream, UdpSocket};
use std::time::Duration;

/// How long an answer may take.
const PATIENCE: Duration = Duration::from_secs(20);
const ID: [u8; 2] = [0x12, 0x34];
/// The type A and the class Internet.
const A_IN: [u8; 4] = [0, 1, 0, 1];

/// The IPv4 addresses of a name, by one datagram each way.
pub fn by_udp(server: IpAddr, name: &str) -> io::Result<Vec<Ipv4Addr>> {
    let any: &str = if server.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
    let socket = UdpSocket::bind(any)?;
    socket.set_read_timeout(Some(PATIENCE))?;
    socket.connect((server, 53))?;
    socket.send(&question(name))?;
    let mut answer = [0; 512];
    let length = socket.recv(&mut answer)?;
    addresses(&answer[..length])
}

/// The same by a connection.
pub fn by_tcp(server: IpAddr, name: &str) -> io::Result<Vec<Ipv4Addr>> {
    let mut stream = TcpStream::connect((server, 53))?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let question = question(name);
    let length = u16::try_from(question.len()).map_err(io::Error::other)?;
    stream.write_all(&[&length.to_be_bytes(), question.as_slice()].concat())?;
    let mut length = [0; 2];
    stream.read_exact(&mut length)?;
    let mut answer = vec![0; usize::from(u16::from_be_bytes(length))];
    stream.read_exact(&mut answer)?;
    addresses(&answer)
}

fn question(name: &str) -> Vec<u8> {
    // Recursion desired; one question.
    let mut message = [ID.as_slice(), &[1, 0, 0, 1, 0, 0, 0, 0, 0, 0]].concat();
    for label in name.split('.') {
        message.push(u8::try_from(label.len()).expect("a short label"));
        message.extend_from_slice(label.as_bytes());
    }
    message.push(0);
    message.extend_from_slice(&A_IN);
    message
}

/// The addresses of an answer without errors: each follows its type, class, time to live and length.
fn addresses(answer: &[u8]) -> io::Result<Vec<Ipv4Addr>> {
    if answer.len() < 12 || answer[..2] != ID || answer[3] & 0xf != 0 {
        return Err(io::Error::other(format!("not a good answer: {answer:?}")));
    }
    let records = answer[12..].windows(14);
    let of_address = records.filter(|record| record[..4] == A_IN && record[8..10] == [0, 4]);
    Ok(of_address.map(|record| Ipv4Addr::new(record[10], record[11], record[12], record[13])).collect())
}
