//! [`Connections`]: all open connections, and which one to close for another.

use std::{
    any::Any,
    collections::{BTreeMap, BTreeSet, HashMap},
    net::IpAddr,
    sync::Arc,
};

use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::{Bounds, Limit, Metrics};

/// Why a request is not admitted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NotAdmitted {
    /// All connections for admitted requests are in use.
    #[error("too many requests at once")]
    Full,
    /// Its connection was closed for another one.
    #[error("the connection was closed")]
    Closed,
}

/// What an admitted request holds until its response ends.
type Permit = Box<dyn Any + Send>;

/// The open connections of a server.
pub(crate) struct Connections {
    bounds: Bounds,
    metrics: Metrics,
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    slots: HashMap<u64, Slot>,
    /// Connections that wait for their client, by turn: the longest wait first.
    waiting: BTreeMap<u64, u64>,
    /// The turns of `waiting` by address.
    by_address: HashMap<IpAddr, BTreeSet<u64>>,
    admitted: usize,
    /// The last connection or turn.
    last: u64,
}

struct Slot {
    address: IpAddr,
    close: Arc<Notify>,
    /// Turn of a connection that waits for its client; `None` while it serves an admitted request.
    turn: Option<u64>,
    permits: Vec<Permit>,
}

impl Table {
    fn next(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    /// Puts a connection at the end of those that wait.
    fn wait(&mut self, id: u64) {
        let turn = self.next();
        let Some(slot) = self.slots.get_mut(&id) else { return };
        slot.turn = Some(turn);
        self.waiting.insert(turn, id);
        self.by_address.entry(slot.address).or_default().insert(turn);
    }

    /// Takes a connection from those that wait.
    fn stop_waiting(&mut self, address: IpAddr, turn: u64) {
        self.waiting.remove(&turn);
        if let Some(turns) = self.by_address.get_mut(&address) {
            turns.remove(&turn);
            if turns.is_empty() {
                self.by_address.remove(&address);
            }
        }
    }

    /// Removes a connection.
    fn remove(&mut self, id: u64) -> Option<Slot> {
        let slot = self.slots.remove(&id)?;
        match slot.turn {
            Some(turn) => self.stop_waiting(slot.address, turn),
            None => self.admitted -= 1,
        }
        Some(slot)
    }

    /// Closes the connection with this turn.
    fn close(&mut self, turn: Option<u64>) -> bool {
        let id = turn.and_then(|turn| self.waiting.get(&turn).copied());
        let Some(slot) = id.and_then(|id| self.remove(id)) else { return false };
        slot.close.notify_one();
        true
    }
}

impl Connections {
    pub fn new(bounds: Bounds, metrics: Metrics) -> Self {
        Self { bounds, metrics, table: Mutex::default() }
    }

    /// Adds a connection. Closes another one if there are too many.
    pub fn open(self: &Arc<Self>, address: IpAddr) -> Connection {
        self.open_within(address, self.bounds.per_address)
    }

    /// Adds a connection of a proxy, which has as many as its clients need.
    pub fn open_of_proxy(self: &Arc<Self>, address: IpAddr) -> Connection {
        self.open_within(address, usize::MAX)
    }

    fn open_within(self: &Arc<Self>, address: IpAddr, per_address: usize) -> Connection {
        let mut table = self.table.lock();
        let of_address = table.by_address.get(&address);
        let (exceeded, turn) = if of_address.is_some_and(|turns| turns.len() >= per_address) {
            (Some(Limit::AddressConnections), of_address.and_then(|turns| turns.first().copied()))
        } else if table.slots.len() >= self.bounds.connections {
            (Some(Limit::Connections), table.waiting.keys().next().copied())
        } else {
            (None, None)
        };
        if let Some(limit) = exceeded {
            table.close(turn);
            self.metrics.refuse(limit);
        }
        let (id, close) = (table.next(), Arc::new(Notify::new()));
        let slot = Slot { address, close: Arc::clone(&close), turn: None, permits: Vec::new() };
        table.slots.insert(id, slot);
        table.wait(id);
        self.metrics.connections.inc();
        Connection { connections: Arc::clone(self), id, close }
    }

    /// Closes the connection that has waited longest; returns false if none waits.
    pub fn close_longest_wait(&self) -> bool {
        let mut table = self.table.lock();
        let turn = table.waiting.keys().next().copied();
        table.close(turn)
    }

    /// Keeps a connection open for its request, which holds `permit` until [`wait`](Self::wait).
    pub fn admit(&self, id: u64, permit: Permit) -> Result<(), NotAdmitted> {
        let mut guard = self.table.lock();
        let table = &mut *guard;
        // A connection that was closed has no slot; its request ends.
        let slot = table.slots.get_mut(&id).ok_or(NotAdmitted::Closed)?;
        if let Some(turn) = slot.turn {
            if table.admitted + self.bounds.reserved >= self.bounds.connections {
                self.metrics.refuse(Limit::Connections);
                return Err(NotAdmitted::Full);
            }
            slot.turn = None;
            slot.permits.push(permit);
            let address = slot.address;
            table.admitted += 1;
            table.stop_waiting(address, turn);
        } else {
            slot.permits.push(permit);
        }
        Ok(())
    }

    /// Ends an admitted request: its connection waits for the client again.
    pub fn wait(&self, id: u64) {
        let mut guard = self.table.lock();
        let table = &mut *guard;
        let Some(slot) = table.slots.get_mut(&id).filter(|slot| slot.turn.is_none()) else {
            return;
        };
        let permits = std::mem::take(&mut slot.permits);
        table.admitted -= 1;
        table.wait(id);
        // Dropping them may run code of the service.
        drop(guard);
        drop(permits);
    }
}

/// An open connection; removed when dropped.
pub(crate) struct Connection {
    connections: Arc<Connections>,
    id: u64,
    close: Arc<Notify>,
}

impl Connection {
    /// Resolves when the connection is closed for another one.
    pub async fn closed(&self) {
        self.close.notified().await;
    }

    /// Identifies the connection in the calls of [`Connections`].
    pub fn id(&self) -> u64 {
        self.id
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.connections.metrics.connections.dec();
        let slot = self.connections.table.lock().remove(self.id);
        drop(slot);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::timeout;

    use super::*;

    fn connections(connections: usize, reserved: usize, per_address: usize) -> Arc<Connections> {
        let bounds = Bounds { connections, reserved, per_address, ..Bounds::default() };
        Arc::new(Connections::new(bounds, Metrics::default()))
    }

    fn address(last: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, last])
    }

    /// Returns which connections were closed, by position.
    async fn closed(open: &[Connection]) -> Vec<usize> {
        let mut closed = Vec::new();
        for (index, connection) in open.iter().enumerate() {
            if timeout(Duration::from_millis(1), connection.closed()).await.is_ok() {
                closed.push(index);
            }
        }
        closed
    }

    #[tokio::test]
    async fn longest_wait_is_closed_for_a_new_connection() {
        let all = connections(3, 1, 9);
        let open: Vec<Connection> = (0..5).map(|last| all.open(address(last))).collect();
        assert_eq!(closed(&open).await, [0, 1]);
        assert_eq!(all.metrics.refusals(Limit::Connections), 2);
        drop(open);
        let again: Vec<Connection> = (0..3).map(|last| all.open(address(last))).collect();
        assert_eq!(closed(&again).await, Vec::<usize>::new());
    }

    #[tokio::test]
    async fn address_loses_its_own_connections_only() {
        let all = connections(100, 1, 2);
        let open: Vec<Connection> = [1, 2, 2, 1, 2, 2].map(|last| all.open(address(last))).into();
        assert_eq!(closed(&open).await, [1, 2]);
        assert_eq!(all.metrics.refusals(Limit::AddressConnections), 2);
    }

    #[tokio::test]
    async fn proxy_has_as_many_connections_as_its_clients_need() {
        let all = connections(9, 1, 2);
        let open: Vec<Connection> = (0..9).map(|_| all.open_of_proxy(address(1))).collect();
        assert_eq!(closed(&open).await, Vec::<usize>::new());
        let more = all.open_of_proxy(address(1));
        assert_eq!(closed(&open).await, [0], "one of all connections is closed");
        drop(more);
    }

    #[tokio::test]
    async fn admitted_request_is_kept_and_leaves_the_reserve() {
        let all = connections(3, 1, 9);
        let mut open: Vec<Connection> = (0..3).map(|last| all.open(address(last))).collect();
        let permit = Arc::new(());
        for connection in &open[..2] {
            assert_eq!(all.admit(connection.id(), Box::new(Arc::clone(&permit))), Ok(()));
        }
        assert_eq!(all.admit(open[2].id(), Box::new(())), Err(NotAdmitted::Full));
        open.extend((3..9).map(|last| all.open(address(last))));
        assert_eq!(closed(&open).await, [2, 3, 4, 5, 6, 7]);
        assert_eq!(all.admit(open[2].id(), Box::new(())), Err(NotAdmitted::Closed));
        assert_eq!(Arc::strong_count(&permit), 3);
        // The end of a response is the end of its permit and the begin of a wait.
        all.wait(open[0].id());
        assert_eq!(Arc::strong_count(&permit), 2);
        assert_eq!(all.admit(open[8].id(), Box::new(())), Ok(()));
        open.push(all.open(address(9)));
        assert_eq!(closed(&open).await, [0]);
        drop(open);
        assert_eq!(Arc::strong_count(&permit), 1);
        let table = all.table.lock();
        assert!(table.slots.is_empty() && table.waiting.is_empty() && table.by_address.is_empty());
        assert_eq!(table.admitted, 0);
    }
}
