//! [`Proxies`]: the proxies that say for which client they forward a request.
//!
//! A header of a client counts only if a trusted proxy sent the request. Each proxy adds the address that it sees at the
//! end of `X-Forwarded-For` or `Forwarded`, so the client is the last one that is not itself a trusted proxy. A proxy
//! that writes one of these headers passes the other one on as the client wrote it: where both are there and differ,
//! neither counts.

use std::{
    net::{IpAddr, SocketAddr},
    str::FromStr,
};

use hyper::{
    HeaderMap,
    header::{FORWARDED, HeaderName},
};
use ipnet::IpNet;

use crate::Peer;

const FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");
/// Most proxies between client and server.
const HOPS_MAX: usize = 16;

/// A network: an address and the length of its prefix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Network(IpNet);

/// A text is not a network.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("expected an address or a network, e.g. 10.0.0.7, 10.0.0.0/8 or fd00::/8")]
pub struct InvalidNetwork;

impl FromStr for Network {
    type Err = InvalidNetwork;

    fn from_str(text: &str) -> Result<Self, InvalidNetwork> {
        let address = text.parse::<IpAddr>().map(IpNet::from);
        address.or_else(|_| text.parse()).map(Self).map_err(|_| InvalidNetwork)
    }
}

/// The proxies that say for which client they forward a request.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Proxies(Vec<Network>);

impl Proxies {
    /// Trusts the proxies with addresses in these networks.
    pub fn of_networks(networks: Vec<Network>) -> Self {
        Self(networks)
    }

    /// Returns whether an address is that of a trusted proxy.
    pub fn contain(&self, address: IpAddr) -> bool {
        self.0.iter().any(|network| network.0.contains(&address.to_canonical()))
    }

    /// Returns the client of a request: the peer of the connection, or what trusted proxies say.
    pub(crate) fn client(&self, peer: Peer, headers: &HeaderMap) -> Peer {
        if self.0.is_empty() || !self.contain(peer.ip) {
            return peer;
        }
        let of_lists =
            [self.last_stranger(addresses(headers)), self.last_stranger(forwarded(headers, "for"))];
        let ip = match of_lists {
            [Some(one), Some(two)] if one != two => None,
            [one, two] => one.or(two),
        };
        let protos = [last(headers, FORWARDED_PROTO), forwarded(headers, "proto").next_back()];
        let is_secure = match protos {
            [Some(one), Some(two)] if !one.eq_ignore_ascii_case(two) => false,
            [one, two] => {
                one.or(two).map_or(peer.is_secure, |proto| proto.eq_ignore_ascii_case("https"))
            }
        };
        Peer { ip: ip.unwrap_or(peer.ip), is_secure }
    }

    /// Returns the last address of a list that is not a trusted proxy. What precedes a text other than an address was not
    /// written by a trusted proxy.
    fn last_stranger<'a>(&self, list: impl DoubleEndedIterator<Item = &'a str>) -> Option<IpAddr> {
        let mut found = None;
        for text in list.rev().take(HOPS_MAX) {
            let Some(address) = address(text) else { break };
            found = Some(address);
            if !self.contain(address) {
                break;
            }
        }
        found
    }
}

/// Returns the items of a header that has lists, in the order of all its lines.
fn items(headers: &HeaderMap, name: HeaderName) -> impl DoubleEndedIterator<Item = &str> {
    let lines = headers.get_all(name).into_iter();
    lines.flat_map(|line| line.to_str().unwrap_or_default().split(',')).map(str::trim)
}

fn addresses(headers: &HeaderMap) -> impl DoubleEndedIterator<Item = &str> {
    items(headers, FORWARDED_FOR)
}

fn last(headers: &HeaderMap, name: HeaderName) -> Option<&str> {
    items(headers, name).next_back()
}

/// Returns a parameter of each item of `Forwarded` (RFC 7239), empty where an item has none.
fn forwarded<'a>(
    headers: &'a HeaderMap,
    parameter: &'static str,
) -> impl DoubleEndedIterator<Item = &'a str> {
    items(headers, FORWARDED).map(move |item| {
        let pairs = item.split(';').filter_map(|pair| pair.split_once('='));
        let mut values = pairs.filter(|(name, _)| name.trim().eq_ignore_ascii_case(parameter));
        values.next().map_or("", |(_, value)| value.trim().trim_matches('"'))
    })
}

/// Parses an address, with a port or without: `10.0.0.7`, `10.0.0.7:4711`, `fd00::7`, `[fd00::7]:4711`.
fn address(text: &str) -> Option<IpAddr> {
    let bare = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text);
    let with_port = || text.parse::<SocketAddr>().map(|address| address.ip());
    bare.parse::<IpAddr>().or_else(|_| with_port()).ok().map(|address| address.to_canonical())
}

#[cfg(test)]
mod tests {
    use hyper::header::HeaderValue;

    use super::*;

    /// Returns the client that a request of `peer` has, as text, and whether it uses TLS.
    fn client(peer: &str, lines: &[(&'static str, &str)]) -> (String, bool) {
        let networks = ["10.0.0.0/8", "fd00::1"].map(|text| text.parse().expect("a network"));
        let mut headers = HeaderMap::new();
        for (name, value) in lines {
            headers.append(*name, HeaderValue::from_str(value).expect("a header"));
        }
        let peer = Peer { ip: peer.parse().expect("an address"), is_secure: false };
        let found = Proxies::of_networks(networks.into()).client(peer, &headers);
        (found.ip.to_string(), found.is_secure)
    }

    #[test]
    fn only_trusted_proxies_name_the_client() {
        let check = |peer: &str, lines: &[(&'static str, &str)], expect: &str| {
            assert_eq!(client(peer, lines).0, expect, "{peer} {lines:?}");
        };
        let of = "x-forwarded-for";
        check("192.0.2.1", &[(of, "198.51.100.7")], "192.0.2.1");
        check("10.0.0.1", &[], "10.0.0.1");
        check("10.0.0.1", &[(of, "198.51.100.7")], "198.51.100.7");
        check("fd00::1", &[(of, "2001:db8::7")], "2001:db8::7");
        check("10.0.0.1", &[(of, "::ffff:198.51.100.7")], "198.51.100.7");
        // What the client wrote itself precedes what the proxies add.
        check("10.0.0.1", &[(of, "1.1.1.1, 198.51.100.7, 10.9.9.9")], "198.51.100.7");
        check("10.0.0.1", &[(of, "1.1.1.1"), (of, "198.51.100.7:4711")], "198.51.100.7");
        check("10.0.0.1", &[(of, "1.1.1.1, unknown")], "10.0.0.1");
        check("10.0.0.1", &[(of, "1.1.1.1, unknown, 10.9.9.9")], "10.9.9.9");
        let standard = "for=1.1.1.1, For=\"[2001:db8::7]:4711\";proto=https";
        check("10.0.0.1", &[("forwarded", standard)], "2001:db8::7");
        check("10.0.0.1", &[("forwarded", "for=1.1.1.1, by=10.0.0.1")], "10.0.0.1");
        check("10.0.0.1", &[("forwarded", "for=1.1.1.1"), (of, "198.51.100.7")], "10.0.0.1");
        check("10.0.0.1", &[("forwarded", "for=1.1.1.1"), (of, "1.1.1.1")], "1.1.1.1");
    }

    #[test]
    fn trusted_proxies_say_whether_the_client_uses_tls() {
        let check = |peer: &str, lines: &[(&'static str, &str)], expect: bool| {
            assert_eq!(client(peer, lines).1, expect, "{peer} {lines:?}");
        };
        check("192.0.2.1", &[("x-forwarded-proto", "https")], false);
        check("10.0.0.1", &[("x-forwarded-proto", "https")], true);
        check("10.0.0.1", &[("x-forwarded-proto", "https, http")], false);
        check("10.0.0.1", &[("forwarded", "for=1.1.1.1;Proto=HTTPS")], true);
        check("10.0.0.1", &[("forwarded", "proto=http"), ("x-forwarded-proto", "https")], false);
    }

    #[test]
    fn network_is_an_address_or_has_a_prefix() {
        for text in ["10.0.0.7", "10.0.0.0/8", "::1", "fd00::/8"] {
            assert!(text.parse::<Network>().is_ok(), "{text}");
        }
        for text in ["", "10.0.0.0/33", "example.org", "10.0.0.0/x"] {
            assert_eq!(text.parse::<Network>(), Err(InvalidNetwork), "{text}");
        }
    }
}
